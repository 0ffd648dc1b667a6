"""CUDA-aware MPI: may it be handed buffers of a device?

The library says so, or the user; a child process settles doubt.

    comm.device  the MPI says yes  it says no       it says nothing, or both
    auto         direct            staged           the child tries
    direct       direct            the child tries  the child tries; where it fails, the run is
                                                    refused
    staged       staged            staged           staged

A wrong yes is a segmentation fault, so the user's is tried as well; it counts more than the
library's no, which can be wrong: what lies below MPI (UCX, libfabric) isn't always asked. Which
memory is meant, `cuda` or `rocm`, depends on the devices: torch calls both cuda.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mpitrain.comm.base import library
from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.world import World
from mpitrain.errors import MeshError, on_all_ranks

# MPI 4.1, section 11.4.3; kinds of devices: "Memory Allocation Kinds" 1.0, its side document
KEY = "mpi_memory_alloc_kinds"
# Open MPI's and MPICH's questions; the number for MPIX_GPU_query_support, which some have alone
QUERIES = {
    "cuda": (("MPIX_Query_cuda_support",), 0),
    "rocm": (("MPIX_Query_rocm_support", "MPIX_Query_hip_support"), 2),
}


class Way(NamedTuple):
    """How a message leaves a device: straight to MPI, or through pinned host memory; and how we know."""

    direct: bool
    reason: str

    def __str__(self) -> str:
        return (
            f"device buffers go {'straight to MPI' if self.direct else 'through pinned host memory'}: "
            f"{self.reason}"
        )


STAGED = Way(False, "nobody asked for more")


# ---------------------------------------------------------------- what the MPI says


def takes_device_memory(kinds: str, vendor: str) -> bool | None:
    """Return whether a list of memory kinds has a `vendor`'s device memory; None without a list.

    kinds: "mpi,system,cuda:device". A kind without restrictors is all of its memory. "cuda:host",
    pinned, and "cuda:managed" aren't torch's buffers.
    """
    names = [kind.strip().lower().split(":") for kind in kinds.split(",") if kind.strip()]
    return (
        any(name == vendor and (not restrictors or "device" in restrictors) for name, *restrictors in names)
        if names
        else None
    )


def what_it_says(vendor: str) -> dict[str, bool]:
    """Return what this MPI, initialised, answers to each question that it understands."""
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get(KEY) or ""
    info.Free()
    listed = takes_device_memory(kinds, vendor)
    found = {} if listed is None else {f"{KEY} = {kinds}": listed}
    return found | answers(library.loaded(), vendor)


def answers(mpi: ctypes.CDLL, vendor: str) -> dict[str, bool]:
    """Return what the functions of a library answer."""
    names, number = QUERIES[vendor]
    replies = {name: int(getattr(mpi, name)()) for name in names if hasattr(mpi, name)}
    if not replies and hasattr(mpi, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        if mpi.MPIX_GPU_query_support(number, ctypes.byref(answer)) == MPI.SUCCESS:
            replies[f"MPIX_GPU_query_support({number})"] = answer.value
    return {
        f"{name}() = {answer}" if name in names else f"{name} = {answer}": answer == 1
        for name, answer in replies.items()
    }


def verdict(said: Mapping[str, bool]) -> bool | None:
    """Return what all answers say together; None if there is none, or if they differ."""
    opinions = set(said.values())
    return opinions.pop() if len(opinions) == 1 else None


def in_words(said: Mapping[str, bool]) -> str:
    """Return the answers as text."""
    return ", ".join(said) or f"no {KEY} and no function that says so in {library.loaded()._name}"


# ---------------------------------------------------------------- what is done


def choose(
    world: World, wanted: str, said: Mapping[str, bool], trial: Callable[[], str], of_device: str = "the GPU"
) -> Way:
    """Return the way that messages take on all ranks: both ends have to agree. Collective over all.

    wanted: comm.device.  said: what this MPI says of the device's memory.
    trial: has a child process try it, and returns how that failed, "" if it didn't; called on the
    first rank of each node, once, if at all.
    Raises MeshError, alike on all ranks.
    """
    if wanted == "staged":
        return Way(False, 'comm.device = "staged"')
    answer = verdict(said)
    words = in_words(said)
    doubtful = any(
        world.all_gather("do they need to try", answer is None or (wanted == "direct" and not answer))
    )
    if not doubtful:
        mine = Way(answer is True, words)
    else:
        failed = world.on_first_of_node("does MPI take device buffers", trial)
        how = (
            f"a child process has sent buffers of {of_device} to itself"
            if not failed
            else f"a child process that tried it {failed}"
        )
        mine = Way(not failed, f"{words}; {how}")
    every = world.all_gather("the way of their messages", mine)
    found: Way = next((way for way in every if not way.direct), every[0])
    if wanted == "direct" and not found.direct:
        raise on_all_ranks(
            MeshError(
                f'comm.device = "direct": this MPI doesn\'t take buffers of {of_device} ({found.reason}); '
                'use "auto" or "staged", or an MPI that was built for it'
            )
        )
    return found

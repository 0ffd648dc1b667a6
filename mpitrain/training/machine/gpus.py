"""What torch says of the GPUs that this process sees, as plain facts.

torch's builds for AMD call everything `cuda`, too: run.device, the type of a device, the module.
Whose GPUs they are counts for the memory kinds of MPI, for fp8 and for the driver, and only there.
"""

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

VENDORS = {"cuda": "NVIDIA", "rocm": "AMD"}  # by what MPI calls their memory
DRIVERS = {"cuda": Path("/proc/driver/nvidia/version"), "rocm": Path("/sys/module/amdgpu/version")}
VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
}


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part that torch counts as one. identity: the same in all processes of a node."""

    name: str
    identity: str
    memory_bytes: int
    architecture: str  # compute capability, as in 9.0; AMD's, as in gfx942

    def __str__(self) -> str:
        return f"{self.name} ({self.memory_bytes / 2**30:.0f} GiB, {self.architecture}, {self.identity})"


@dataclass(frozen=True)
class Gpus:
    """All that this process sees, by index.

    use: makes one the device of the calling thread.
    kind: what torch calls such devices.
    """

    vendor: str | None  # cuda, rocm; None if there is none
    seen: tuple[Gpu, ...]
    driver: str
    use: Callable[[int], None]
    kind: str = "cuda"


def torch_gpus() -> Gpus:
    """Ask torch. The first call starts its driver, if there is one."""
    vendor = "rocm" if torch.version.hip else "cuda"
    if not torch.cuda.is_available():
        return Gpus(None, (), driver(vendor), use)
    seen = tuple(_gpu(index, vendor) for index in range(torch.cuda.device_count()))
    return Gpus(vendor, seen, driver(vendor), use)


def use(index: int) -> None:
    """Make a GPU the device of this thread, and its context, which libraries below MPI ask for."""
    torch.cuda.set_device(index)
    # before CUDA 12 it is the first call that takes the context, not the choice
    torch.cuda.current_stream(index).query()


def _gpu(index: int, vendor: str) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    architecture = properties.gcnArchName.partition(":")[0] if vendor == "rocm" else capability
    named = identity(properties, index, vendor, os.environ)
    return Gpu(properties.name, named, properties.total_memory, architecture)


def identity(properties: object, index: int, vendor: str, environment: Mapping[str, str]) -> str:
    """Return what names a GPU on its node: its UUID, else its place on the bus, else its number there.

    Some of AMD's have a UUID of zeros, which is none.
    """
    uuid = str(getattr(properties, "uuid", "")).strip()
    if uuid.strip("0-"):
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None not in place:
        return "PCI {:04x}:{:02x}:{:02x}".format(*place)
    for name in VISIBLE[vendor]:  # the first counts among those that the next let through
        listed = [word.strip() for word in environment.get(name, "").split(",") if word.strip()]
        if index < len(listed) and not listed[index].isdecimal():
            return listed[index]
        index = int(listed[index]) if index < len(listed) else index
    return f"number {index}"


def driver(vendor: str, files: Mapping[str, Path] = DRIVERS) -> str:
    """Return what the kernel says of the driver, in a line; nothing if there is none."""
    try:
        line = files[vendor].read_text(errors="replace").partition("\n")[0]
    except OSError:
        return ""
    versions = [word for word in line.split() if word[:1].isdigit() and "." in word]
    return versions[0] if versions else line.strip()


def build() -> str:
    """Return what torch is built for."""
    kind = f"ROCm {torch.version.hip}" if torch.version.hip else "CPUs"
    kind = f"CUDA {torch.version.cuda}" if torch.version.cuda else kind
    return f"torch {torch.__version__} for {kind}, {platform.machine()}"


# ---------------------------------------------------------------- who takes which


def share_out(visible: Sequence[Sequence[str]]) -> list[str | None]:
    """Return which GPU each rank of a node takes, given what each sees, by identity; None if it sees none.

    A rank takes the first it sees of those that the fewest before it have taken.
    """
    taken = dict[str, int]()
    choices = list[str | None]()
    for seen in visible:
        choice = min(seen, key=lambda gpu: taken.get(gpu, 0), default=None)
        choices.append(choice)
        if choice is not None:
            taken[choice] = taken.get(choice, 0) + 1
    return choices


# --------------------------------------------------- what a child process tries (comm/device/gpu_probe.py)


def buffers(index: str) -> tuple[Callable[[np.ndarray], torch.Tensor], Callable[[torch.Tensor], np.ndarray]]:
    """Return what copies bytes to the memory of a GPU, and back."""
    use(int(index))

    def put(x: np.ndarray) -> torch.Tensor:
        on_gpu = torch.from_numpy(x).to(torch.device("cuda", int(index)))
        torch.cuda.synchronize()
        return on_gpu

    return put, lambda x: x.cpu().numpy()

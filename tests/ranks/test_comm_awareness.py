"""May MPI be handed device buffers? What it says, what the user says, and a child process that tries.

No MPI here takes any: what it would say is planted, and what a child tries is host memory, a crash,
a hang, or wrong bytes.
"""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import agree
from launch import patience

WAYS = pytest.mark.parametrize(
    ("factory", "expected"),
    [
        ("host", ""),
        ("crashes", "was killed by SIGSEGV"),
        ("aborts", "was killed by SIGABRT"),
        ("comes_wrong", "ended with exit code 1: 1,048,576 of 1,048,576 bytes arrived wrong"),
        ("is_not_there", "ended with exit code 1: RuntimeError: no HIP GPUs are available"),
        ("ends_early", "ended with exit code 0: and printed nothing"),
    ],
)


@pytest.mark.parametrize(
    ("kinds", "vendor", "expected"),
    [
        ("", "cuda", None),
        (" , ", "cuda", None),
        ("mpi,system", "cuda", False),
        ("mpi,system,cuda", "cuda", True),
        ("mpi,system,cuda", "rocm", False),
        ("system, cuda:device ,mpi", "cuda", True),
        ("mpi,system,cuda:host", "cuda", False),
        ("mpi,system,cuda:managed", "cuda", False),
        ("cuda:host,cuda:device", "cuda", True),
        ("cuda:host:device", "cuda", True),
        ("CUDA:Device", "cuda", True),
        ("mpi,rocm:device:coarse", "rocm", True),
        ("mpi,rocm:host,cuda:device", "rocm", False),
        ("mpi,barracuda", "cuda", False),
        ("mpi:cuda,system", "cuda", False),
        ("mpi,system,level_zero:device", "cuda", False),
    ],
)
def test_a_list_of_memory_kinds_is_read_kind_by_kind(kinds, vendor, expected):
    from mpitrain.comm.device.gpu_support import takes_device_memory

    assert takes_device_memory(kinds, vendor) is expected


@pytest.mark.parametrize(
    ("functions", "vendor", "expected"),
    [
        (dict(MPIX_Query_cuda_support=lambda: 1), "cuda", {"MPIX_Query_cuda_support() = 1": True}),
        # an MPI for NVIDIA's devices under a torch for AMD's
        (dict(MPIX_Query_cuda_support=lambda: 1), "rocm", {}),
        (
            dict(MPIX_Query_cuda_support=lambda: 1, MPIX_Query_rocm_support=lambda: 0),
            "rocm",
            {"MPIX_Query_rocm_support() = 0": False},
        ),
        (dict(MPIX_Query_hip_support=lambda: 1), "rocm", {"MPIX_Query_hip_support() = 1": True}),
        ({}, "cuda", {}),
    ],
)
def test_the_library_is_asked_for_the_vendor_of_the_device(functions, vendor, expected):
    from mpitrain.comm.device.gpu_support import answers

    assert answers(SimpleNamespace(**functions), vendor) == expected


def test_older_mpichs_have_one_question_for_all_vendors():
    from mpitrain.comm.device.gpu_support import answers

    def query(number, found):
        found._obj.value = number == 2
        return 0

    library = SimpleNamespace(MPIX_GPU_query_support=query)
    assert answers(library, "rocm") == {"MPIX_GPU_query_support(2) = 1": True}
    assert answers(library, "cuda") == {"MPIX_GPU_query_support(0) = 0": False}
    library.MPIX_GPU_query_support = lambda number, found: 16  # an error
    assert answers(library, "cuda") == {}


@pytest.mark.parametrize(
    ("said", "expected"), [([], None), ([True], True), ([False, False], False), ([True, False], None)]
)
def test_answers_that_differ_are_none(said, expected):
    from mpitrain.comm.device.gpu_support import verdict

    assert verdict({str(place): answer for place, answer in enumerate(said)}) is expected


def test_the_loaded_library_is_found_whoever_opened_it():
    """Wheels are opened for mpi4py alone: ctypes.CDLL(None) doesn't see them."""
    from mpitrain.comm.base import library

    mpi = library.loaded()
    assert "libmpi" in os.path.basename(mpi._name) and os.path.exists(mpi._name), mpi._name
    assert mpi.MPIX_Query_cuda_support
    with open("/proc/self/maps") as maps:
        assert any(line.rstrip().endswith(os.path.realpath(mpi._name)) for line in maps)


def test_a_child_hears_nothing_of_the_launcher_and_all_of_the_user():
    from mpitrain.comm.base.launchers import without_launcher

    of_launchers = (
        "PMI_RANK PMI_FD PMIX_RANK OMPI_COMM_WORLD_RANK OMPI_UNIVERSE_SIZE PRTE_LAUNCHED HYDI_CONTROL_FD "
        "MPI_LOCALRANKID"
    )
    of_launchers += (
        " SLURM_PROCID PALS_RANKID OMPI_MCA_ess OMPI_MCA_orte_hnp_uri OMPI_MCA_ess_base_jobid FLUX_TASK_RANK"
    )
    of_users = (
        "PATH CUDA_VISIBLE_DEVICES OMPI_MCA_pml MPIR_CVAR_ENABLE_GPU MPICH_GPU_SUPPORT_ENABLED UCX_TLS "
        "I_MPI_OFFLOAD"
    )
    found = without_launcher({name: "1" for name in (of_launchers + " " + of_users).split()})
    assert set(found) == set(of_users.split())


@WAYS
def test_how_a_child_ended_is_reported(factory, expected):
    from mpitrain.comm.device.gpu_probe import attempt

    assert attempt(f"trials:{factory}", "0") == expected


def test_a_child_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    from mpitrain.comm.device.gpu_probe import attempt

    assert attempt("trials:hangs", str(tmp_path / "pid"), limit_s=3.0) == "did not end within 3 s"
    for_ever = Path(f"/proc/{(tmp_path / 'pid').read_text()}/cmdline")
    ends = time.monotonic() + patience(10)
    while for_ever.exists() and for_ever.read_bytes():  # of a zombie it is empty
        assert time.monotonic() < ends, "what it started is still there"
        time.sleep(0.01)


# ---------------------------------------------------------------- among ranks


@pytest.mark.mpi
def test_what_this_mpi_says_of_itself():
    from mpitrain.comm.base import library
    from mpitrain.comm.device.gpu_support import verdict, what_it_says

    cuda = what_it_says("cuda")
    rocm = what_it_says("rocm")
    assert "MPIX_Query_cuda_support() = 0" in cuda and verdict(cuda) is False and verdict(rocm) is False
    assert {"MPICH": "MPIX_Query_hip_support() = 0", "Open MPI": "MPIX_Query_rocm_support() = 0"}[
        library.vendor()
    ] in rocm


@pytest.fixture
def ranks(world):
    from mpitrain.comm.base.world import NULL_REPORTER, World

    found = World(world, NULL_REPORTER)
    yield found
    found.node.Free()


YES = {"a = 1": True}
NO = {"a = 0": False}
SILENT = {}
BOTH = {"a = 1": True, "b = 0": False}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("asked", "said", "tries", "direct_if_it_works", "direct_if_not"),
    [
        ("auto", YES, False, True, True),
        ("auto", NO, False, False, False),
        ("auto", SILENT, True, True, False),
        ("auto", BOTH, True, True, False),
        ("staged", YES, False, False, False),
        ("staged", BOTH, False, False, False),
        ("direct", YES, False, True, True),
        ("direct", NO, True, True, "refused"),
        ("direct", SILENT, True, True, "refused"),
        ("direct", BOTH, True, True, "refused"),
    ],
)
@pytest.mark.parametrize("works", [True, False])
def test_the_table_in_awareness(ranks, asked, said, tries, direct_if_it_works, direct_if_not, works):
    from mpitrain.comm.device.gpu_support import choose
    from mpitrain.errors import MeshError

    tried = []

    def trial():
        tried.append(ranks.rank)
        return "" if works else "was killed by SIGSEGV"

    try:
        found = choose(ranks, asked, said, trial)
        direct = found.direct
    except MeshError as error:
        found = str(error)
        words = 'comm.device = "direct"' in found and "SIGSEGV" in found and '"auto" or "staged"' in found
        direct = "refused" if error.everywhere and words else "told badly"
    wanted = direct_if_it_works if works else direct_if_not
    first = ranks.node.rank == 0
    agree(ranks.comm, direct == wanted and bool(tried) == (tries and first), f"{found} {tried}")


@pytest.mark.mpi(min_size=2)
def test_one_rank_in_doubt_makes_all_of_them_try_and_one_that_may_not_makes_all_go_by_the_host(ranks):
    from mpitrain.comm.device.gpu_support import choose

    last = ranks.rank == ranks.size - 1
    unsure = choose(ranks, "auto", SILENT if last else YES, lambda: "")
    staged = choose(ranks, "auto", NO if last else YES, lambda: "")
    agree(ranks.comm, unsure.direct and not staged.direct and "a = 0" in staged.reason, f"{unsure} {staged}")


@pytest.mark.mpi
@pytest.mark.sizes(2)
@WAYS
def test_a_child_of_a_rank_is_an_mpi_process_of_its_own(ranks, factory, expected, monkeypatch):
    """One on each node, while the others wait in MPI; what it ends by leaves the job alone."""
    from mpitrain.comm.device.gpu_probe import attempt
    from mpitrain.comm.device.gpu_support import choose

    monkeypatch.setenv("OMPI_MCA_KEPT", "by the user")
    factory, argument = ("asks_for_its_world", "by the user") if factory == "host" else (factory, "0")
    found = choose(ranks, "auto", SILENT, lambda: attempt(f"trials:{factory}", argument))
    agree(ranks.comm, found.direct == (not expected) and expected in found.reason, str(found))

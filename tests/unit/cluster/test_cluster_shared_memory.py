"""What killed jobs left in shared memory is told, and nothing that a process still has."""

import mmap
import os
import subprocess

import pytest
from launch import MPIRUN, MPITRAIN, environment, tail
from mounts import CONTAINER, may_mount

from mpitrain.cluster.shared_memory import YOUNG_S, describe, left_behind, too_little


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a file as an MPI does, so many seconds ago."""

    def make(name, age_s, size=1 << 20):
        path = tmp_path / name
        path.write_bytes(bytes(size))
        then = path.stat().st_mtime - age_s
        os.utime(path, (then, then))
        return path

    return make


def test_only_old_files_of_mpi_that_nobody_has_are_left_behind(tmp_path, make):
    old = [make(name, 2 * YOUNG_S) for name in ("mpich_shm_a", "sm_segment.node.0.1.0")]
    make("mpich_shm_young", 0)
    make("of another program", 2 * YOUNG_S)
    (tmp_path / "mpich_shm_link").symlink_to(old[0])
    used = make("ucx_shm_posix_1", 2 * YOUNG_S)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert left_behind(tmp_path) == old
    assert left_behind(tmp_path) == [*old, used]


def test_they_are_reported_with_what_removes_them(tmp_path, make):
    assert "left" not in describe(tmp_path) and f"GB free in {tmp_path}" in describe(tmp_path)
    for number in range(3):
        make(f"mpich_shm_{number}", 2 * YOUNG_S, 4 << 20)
    make("sm_segment.node.0", 2 * YOUNG_S, 0)
    other = make("of another program", 2 * YOUNG_S)
    words, _, command = describe(tmp_path).partition("; remove them when none of yours runs here:\n  ")
    assert words.endswith("; 4 files (0.013 GB) were left by killed jobs"), words
    subprocess.run(command, shell=True, check=True)
    assert list(tmp_path.iterdir()) == [other]


def test_where_there_is_none_it_says_so(tmp_path):
    assert describe(tmp_path / "absent").startswith("none: ") and left_behind(tmp_path / "absent") == []


def test_what_mpi_needs_is_reported_where_it_isnt_there(tmp_path):
    assert too_little(None, 16, tmp_path) == too_little(1 << 30, 16, tmp_path) == ""
    said = too_little(64 << 20, 16, tmp_path)
    here = f"{tmp_path} of {os.uname().nodename}"
    assert said.startswith(
        f"{here} had 67 MB free, and MPI may need 101 MB there for 16 ranks: make it larger ("
    )


@may_mount
def test_a_rank_that_dies_in_mpi_init_for_want_of_shared_memory_says_so(tmp_path):
    """MPICH's, which takes what it may need as it starts; Open MPI's takes little."""
    if (
        "HYDRA"
        not in subprocess.run(
            [MPIRUN, "--version"], capture_output=True, text=True, env=environment(), check=True
        ).stdout
    ):
        pytest.skip("Open MPI starts")
    shell = f"{CONTAINER.format(size='16m')} {MPIRUN} -n 6 {MPITRAIN} run --set run.dir={tmp_path / 'run'}"
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", shell], capture_output=True, text=True, env=environment(), timeout=120
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("mpitrain: ")]
    assert done.returncode and len(said) == 1 and "to call MPI_Init: the process is gone" in said[0], tail(
        done.stdout + done.stderr
    )
    assert (
        "/dev/shm of" in said[0]
        and "had 17 MB free, and MPI may need 38 MB there for 6 ranks: make it larger" in said[0]
    )

"""What killed jobs left in shared memory is told, and nothing that a process still has."""

import mmap
import os
import subprocess

import pytest

from mpitrain.cluster.shared_memory import YOUNG_S, left_behind, told


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


def test_they_are_told_with_what_removes_them(tmp_path, make):
    assert "left" not in told(tmp_path) and f"GB free in {tmp_path}" in told(tmp_path)
    for number in range(3):
        make(f"mpich_shm_{number}", 2 * YOUNG_S, 4 << 20)
    make("sm_segment.node.0", 2 * YOUNG_S, 0)
    other = make("of another program", 2 * YOUNG_S)
    words, _, command = told(tmp_path).partition(": when none of yours runs here, ")
    assert words.endswith("; 4 files of 0.013 GB are left of jobs that were killed"), words
    subprocess.run(command, shell=True, check=True)
    assert list(tmp_path.iterdir()) == [other]


def test_where_there_is_none_it_says_so(tmp_path):
    assert told(tmp_path / "absent").startswith("none: ") and left_behind(tmp_path / "absent") == []

"""A thread syncs what is written: a disk that fails is named, and no file is left open."""

import errno
import os

import pytest

from mpitrain.weights import syncing as threads
from mpitrain.weights.syncing import Syncing


@pytest.fixture
def files(tmp_path):
    """Three files with something in them, by their paths."""
    found = {}
    for name in "abc":
        found[tmp_path / name] = open(tmp_path / name, "wb", buffering=0)  # noqa: SIM115
        found[tmp_path / name].write(name.encode())
    yield found
    assert all(file.closed for file in found.values())


@pytest.fixture
def synced(monkeypatch):
    """The names of files that were synced, in their order; b can't be."""
    found = []

    def sync(descriptor):
        name = os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))
        found.append(name)
        if name == "b":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(threads.os, "fsync", sync)
    return found


def refuse(*given):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("threaded", [True, False])
def test_a_file_that_does_not_reach_the_disk_is_named(files, synced, monkeypatch, threaded):
    if not threaded:
        monkeypatch.setattr(threads.ThreadPoolExecutor, "submit", refuse)
    with Syncing() as syncing:
        for path, file in files.items():
            syncing.add(path, file)
        with pytest.raises(OSError, match="Input/output error") as caught:
            syncing.wait()
    assert caught.value.filename == str([*files][1]) and synced == ["a", "b", "c"]


def test_a_file_is_synced_before_waiting_ends(files, synced):
    with Syncing() as syncing:
        for path, file in files.items():
            if path.name != "b":
                syncing.add(path, file)
        syncing.wait()
        assert synced == ["a", "c"]
    [*files.values()][1].close()

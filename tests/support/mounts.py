"""A mount namespace with as little shared memory as a container has."""

import subprocess

import pytest

CONTAINER = "mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "
may_mount = pytest.mark.skipif(
    subprocess.run("unshare -m mount -t tmpfs tmpfs /dev/shm", shell=True, capture_output=True).returncode
    != 0,
    reason="needs a mount namespace: root",
)

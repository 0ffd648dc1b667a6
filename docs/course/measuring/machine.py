"""Say on which machine, with which libraries and of which version something was measured."""

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path


@functools.cache
def line() -> str:
    """Return processor, cores, versions and commit in one line."""
    return (
        f"{_processor()}, {os.cpu_count()} cores shared with other programs, torch {_version('torch')}, "
        f"{_mpi()}, Python {platform.python_version()}, mpitrain {_version('mpitrain')} at {_commit()}"
    )


def _processor() -> str:
    """Return the processor's name and family, as the kernel names them."""
    found = {}
    for each in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = each.partition(":")
        found.setdefault(name.strip(), value.strip())
    family = f"family {found['cpu family']}" if "cpu family" in found else platform.machine()
    return f"{found.get('model name', platform.machine())} ({family})"


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def _mpi() -> str:
    for package, name in (("mpich", "MPICH"), ("openmpi", "Open MPI")):
        try:
            return f"{name} {_version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "the site's MPI"


def _commit() -> str:
    here = str(Path(__file__).parent)
    command = ["git", "-C", here, "log", "-1", "--format=%h", "--", ":/mpitrain", ":/comm", ":/schedules"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "no commit"

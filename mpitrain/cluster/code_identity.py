"""What has to be the same on all ranks besides their input: this code, and the libraries that compute."""

import hashlib
import platform
from functools import cache
from pathlib import Path

import msgspec

import mpitrain
import mpitrain.comm
import mpitrain.schedules
from mpitrain import plugins
from mpitrain.config import Config

LIBRARIES = ("torch", "numpy", "mpi4py", "h5py")


def code() -> dict[str, str]:
    """Return digests and versions by what they are of. Imports none of the libraries."""
    return {
        "the code of mpitrain": _digest_of_sources(),
        "the version of Python": platform.python_version(),
        **{f"the version of {name}": _version(name) for name in LIBRARIES},
    }


def code_of_plugins(config: Config) -> dict[str, str]:
    """Return digests of the plug-ins' modules that a configuration names."""
    sources = plugins.sources(msgspec.to_builtins(config))
    return {f"the code of {name}": hashlib.sha256(text).hexdigest()[:12] for name, text in sources.items()}


def digest(*parts: str) -> str:
    """Return a short digest of texts."""
    return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:12]


@cache  # a rank compares its code and writes it into checkpoints: the code that it has begun with
def _digest_of_sources() -> str:
    hasher = hashlib.sha256()
    for package in (mpitrain, mpitrain.comm, mpitrain.schedules):
        folder = Path(package.__file__).parent
        for path in sorted(folder.rglob("*.py")):
            hasher.update(f"{package.__name__}/{path.relative_to(folder).as_posix()}\0".encode())
            hasher.update(path.read_bytes())
    return hasher.hexdigest()[:12]


@cache
def _version(name: str) -> str:
    # asked on one rank of a node: it imports `email`, a megabyte
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "none"

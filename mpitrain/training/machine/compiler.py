"""What `run.compile` needs on a rank, looked for before anything is written."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec

from mpitrain.errors import ConfigError

# inductor's choice where the environment has no CXX
CXX = "clang++" if sys.platform == "darwin" else "g++"
C = ("gcc", "clang", "cc")  # Triton's, where it has no CC
CHANGE = "or set run.compile=false"
TRY_S = 60.0  # a compiler on a slow file system


def require(vendor: str | None, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError unless torch can compile for CPUs, or for the GPUs of a vendor."""
    if vendor is None:
        _require_cxx(environment.get("CXX", CXX), environment)
        return
    if find_spec("triton") is None:
        raise _refusal("found no Triton", "it, which torch's builds for GPUs bring along", "install it,")
    names = (environment["CC"],) if environment.get("CC") else C
    if not any(_path(name, environment) for name in names):
        raise _refusal(
            f"found no C compiler ({', '.join(names)})", "one, by Triton", "install it, name another by CC,"
        )


def _require_cxx(name: str, environment: Mapping[str, str]) -> None:
    """Let the compiler read the header that all of inductor's code begins with."""
    path = _path(name, environment)
    change = "install it, name another by CXX,"
    if path is None:
        raise _refusal(f"found no C++ compiler ({name})", "one, by torch.compile", change)
    command = [path, "-x", "c++", "-fsyntax-only", "-I", sysconfig.get_path("include"), "-"]
    try:
        done = subprocess.run(
            command,
            input="#include <Python.h>\n",
            capture_output=True,
            text=True,
            timeout=TRY_S,
            env=dict(environment),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refusal(
            f"found a C++ compiler that doesn't run ({name}: {error})", "one that does", change
        ) from None
    if done.returncode:
        said = (done.stderr.strip() or "nothing").splitlines()[0]
        needed = "one that compiles for this Python, with its headers (python3-dev)"
        raise _refusal(
            f"found a C++ compiler that can't read Python.h ({name} says: {said})", needed, "install them,"
        )


def _path(name: str, environment: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=environment.get("PATH", ""))


def _refusal(found: str, needed: str, change: str) -> ConfigError:
    return ConfigError(
        f"run.compile = true: {found} on {socket.gethostname()}; needed {needed}; {change} {CHANGE}"
    )

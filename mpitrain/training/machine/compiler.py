"""What `run.compile` needs on a rank, looked for before anything is written."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec
from typing import NamedTuple

from mpitrain.errors import ConfigError


class Language(NamedTuple):
    """What a compiler compiles, who calls it, and which one: named by a variable, else the first there is."""

    title: str
    option: str
    variable: str
    names: tuple[str, ...]
    caller: str


CXX_OF_INDUCTOR = Language(
    "C++", "c++", "CXX", ("clang++" if sys.platform == "darwin" else "g++",), "torch.compile"
)
C_OF_TRITON = Language("C", "c", "CC", ("gcc", "clang", "cc"), "Triton")
REQUIRED = "run.compile = true: "
CHANGE = "or set run.compile=false"
TRY_S = 60.0  # a compiler on a slow file system


def require(vendor: str | None, environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError unless torch can compile here for CPUs, or for the GPUs of a vendor."""
    if vendor is None:
        _require(CXX_OF_INDUCTOR, environment)
    elif find_spec("triton") is None:
        raise _refusal("found no Triton", "it, which torch's builds for GPUs bring along", "install it,")
    else:
        _require(C_OF_TRITON, environment)


def missing(vendor: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what is said where `run.compile = "auto"` can't compile for GPUs of a vendor; else nothing."""
    try:
        require(vendor, environment)
    except ConfigError as error:
        return f"not compiled, and slower for it: {str(error).split(REQUIRED)[-1]}"
    return ""


def _require(language: Language, environment: Mapping[str, str]) -> None:
    """Let the compiler read the header that all that is compiled begins with."""
    names = (environment[language.variable],) if environment.get(language.variable) else language.names
    places = environment.get("PATH", "")
    path = next(filter(None, (shutil.which(name, path=places) for name in names)), None)
    change = f"install it, name another by {language.variable},"
    kind = f"{language.title} compiler"
    if path is None:
        raise _refusal(f"found no {kind} ({', '.join(names)})", f"one, by {language.caller}", change)
    command = [path, "-x", language.option, "-fsyntax-only", "-I", sysconfig.get_path("include"), "-"]
    channels = dict(input="#include <Python.h>\n", capture_output=True, text=True)
    try:
        done = subprocess.run(command, **channels, timeout=TRY_S, env=dict(environment))
    except (OSError, subprocess.TimeoutExpired) as error:
        fault = f"found a {kind} that doesn't run ({path}: {error})"
        raise _refusal(fault, "one that does", change) from None
    if done.returncode:
        said = (done.stderr.strip() or "nothing").splitlines()[0]
        needed = "one that compiles for this Python, with its headers (python3-dev)"
        fault = f"found a {kind} that can't read Python.h ({path} says: {said})"
        raise _refusal(fault, needed, "install them,")


def _refusal(fault: str, needed: str, change: str) -> ConfigError:
    return ConfigError(f"{REQUIRED}{fault} on {socket.gethostname()}; needed {needed}; {change} {CHANGE}")

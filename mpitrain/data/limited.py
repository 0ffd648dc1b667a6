"""Run a stranger's program, or read a stranger's file, in a child with limits of memory and time.

    parts(module, given, limits)       the parent: what the child answers, part after part
    python -P -m MODULE LIMITS         the child, which calls serve()

The child's limits are the system's (setrlimit), which hold within one operation of a library, too.
"""

import json
import os
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, NamedTuple, TypeVar

from mpitrain.comm.base.interpreter import python
from mpitrain.errors import LibraryError

REFUSED = 3  # exit code: the last line on stderr says why
OUT_OF_MEMORY = 4
NO_LIBRARY = 5
MOST_PART = 1 << 30
WAIT = 6  # times cpu_s, for which a part on a busy machine may take
MOST_SAID = 1 << 20  # bytes of what a child says of an error
LENGTH = struct.Struct("<Q")
T = TypeVar("T")
DAMAGED = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)


class Limits(NamedTuple):
    """Of a child. memory: bytes of address space. cpu_s: seconds of one core."""

    memory: int
    cpu_s: int


class LimitedError(Exception):
    """A child gave no answer; the text says why."""


def parts(module: str, given: bytes, limits: Limits) -> Iterator[bytes]:
    """Yield the parts that a child answers; it ends with the reading. Raises LimitedError, LibraryError."""
    with nameless_file() as said:
        try:
            child = subprocess.Popen(
                python("-m", module, json.dumps(limits)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env={**os.environ, "RUST_BACKTRACE": "0"},
            )
        except OSError as error:
            raise LimitedError(f"the process that reads it can't be started: {error.strerror}") from None
        with child:
            try:
                with suppress(BrokenPipeError), _in_time(child, limits):
                    child.stdin.write(given)
                    child.stdin.close()
                while (part := _next_part(child, limits)) is not None:
                    yield part
                code = child.wait()
            finally:
                child.kill()
        if code:
            said.seek(0)
            raise _error(code, said.read(MOST_SAID), limits)


def _next_part(child: subprocess.Popen[bytes], limits: Limits) -> bytes | None:
    """Return what a child answers next; None: nothing more."""
    with _in_time(child, limits):
        head = child.stdout.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        if length > MOST_PART:
            raise LimitedError(f"a part of it has {length:,} bytes")
        part = child.stdout.read(length)
        return part if len(part) == length else None


@contextmanager
def _in_time(child: subprocess.Popen[bytes], limits: Limits) -> Iterator[None]:
    """Kill a child that the block waits for too long: one that computes nothing meets no other limit."""
    timer = threading.Timer(WAIT * limits.cpu_s, child.kill)
    try:
        timer.start()
    except (RuntimeError, MemoryError):
        raise LimitedError("no thread can be started that limits its time (ulimit -u)") from None
    try:
        yield
    finally:
        timer.cancel()


def nameless_file() -> BinaryIO:
    """Return a file that no folder has, in memory where the system offers it."""
    if hasattr(os, "memfd_create"):  # Linux
        return os.fdopen(os.memfd_create("stderr", os.MFD_CLOEXEC), "w+b")
    return tempfile.TemporaryFile()


def _error(code: int, printed: bytes, limits: Limits) -> Exception:
    last = printed.decode(errors="replace").strip().rpartition("\n")[2]
    why = last or f"the process that reads it ended with code {code}"
    if code == NO_LIBRARY:
        return LibraryError(last)
    if code == OUT_OF_MEMORY or b"memory allocation of" in printed:
        why = f"it needs more than {limits.memory / 1e9:,.1f} GB of memory"
    elif code in (-signal.SIGXCPU, -signal.SIGKILL):
        why = f"it takes more than {limits.cpu_s} s of a core, or {WAIT * limits.cpu_s} s for a part"
    elif -code in DAMAGED:
        why = f"the library that reads it crashes ({signal.Signals(-code).name})"
    return LimitedError(why)


def grouped(
    items: Iterable[T], size_of: Callable[[T], int], most_bytes: int, most: int | None = None
) -> Iterator[list[T]]:
    """Yield items in groups that end with the one that is past `most_bytes`, or with the `most`-th."""
    group, size = list[T](), 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size > most_bytes or len(group) == most:
            yield group
            group, size = [], 0
    if group:
        yield group


def serve(reply: Callable[[bytes], Iterable[bytes]]) -> None:
    """Answer the bytes on stdin with parts, under the limits of the command line."""
    memory, cpu_s = json.loads(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is an answer here
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_SAID, MOST_SAID))  # stderr is a file in memory
    code = 0
    try:
        for part in reply(sys.stdin.buffer.read()):
            sys.stdout.buffer.write(LENGTH.pack(len(part)) + part)
        sys.stdout.buffer.flush()
    except MemoryError:
        code = OUT_OF_MEMORY
    except LibraryError as error:
        code = _said(error.args[0], NO_LIBRARY)
    except BaseException as error:  # a panic of a library of Rust is no Exception
        code = _said(str(error) or type(error).__name__, REFUSED)
    os._exit(code)  # at once: what was made may take seconds to free


def _said(text: str, code: int) -> int:
    line = " ".join(text[:2000].split())
    os.write(2, f"\n{line}".encode(errors="backslashreplace"))
    return code

"""Errors of the tokenizers library, some of which are panics of its own code."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpitrain.data.limited import nameless_file
from mpitrain.inputs import shown

STDERR = 2
MOST_KEPT_BYTES = 1 << 20


class LibraryFailure(Exception):
    """The library can't do what it was asked for; the text says why."""


@functools.cache
def _kept() -> int:
    """Return the descriptor of a file in memory; many a document takes less time than to make one."""
    with nameless_file() as file:
        return os.dup(file.fileno())


@contextmanager
def library_calls(refused: Callable[[str], Exception] = LibraryFailure) -> Iterator[None]:
    """Raise what `refused` makes of an error of the library: an Exception, or a panic, which is none.

    A panic prints some forty lines to descriptor 2, which leads elsewhere meanwhile. What others
    have written there is written again, unless it is a panic's.
    """
    panic = False
    console = os.dup(STDERR)
    os.dup2(_kept(), STDERR)
    try:
        yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if not panic and not isinstance(error, Exception):
            raise
        raise refused(shown(error)) from error
    finally:
        os.dup2(console, STDERR)
        os.close(console)
        if size := os.fstat(_kept()).st_size:
            text = b"" if panic else os.pread(_kept(), min(size, MOST_KEPT_BYTES), 0)
            os.ftruncate(_kept(), 0)
            os.lseek(_kept(), 0, os.SEEK_SET)
            sys.stderr.buffer.write(text)
            sys.stderr.flush()

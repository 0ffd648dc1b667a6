"""Errors of the tokenizers library that are panics of its own code.

Told from others, and kept from printing their stacks.
"""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mpitrain.data.limited import nameless_file

STDERR = 2
MOST_KEPT_BYTES = 1 << 20


def raise_what_is_not_the_librarys(error: BaseException) -> None:
    """Raise an error again that isn't the library's own: plain Exception, or a panic, which is no
    Exception.
    """
    if not isinstance(error, Exception) and not _is_panic(error):
        raise error


def _is_panic(error: BaseException | None) -> bool:
    return type(error).__name__ == "PanicException"


@functools.cache
def _kept() -> int:
    """Return the descriptor of a file in memory.

    It is made once: documents are many, and some take less time than to make it.
    """
    with nameless_file() as file:
        return os.dup(file.fileno())


@contextmanager
def panics_unprinted() -> Iterator[None]:
    """Keep what a panic of the library prints by itself from the console.

    Some forty lines above the one message.

    It writes to descriptor 2, which leads elsewhere meanwhile. What others have written there is
    written again, unless it is a panic's.
    """
    panic = False
    console = os.dup(STDERR)
    os.dup2(_kept(), STDERR)
    try:
        yield
    except BaseException as error:
        panic = _is_panic(error)
        raise
    finally:
        os.dup2(console, STDERR)
        os.close(console)
        if size := os.fstat(_kept()).st_size:
            text = b"" if panic else os.pread(_kept(), min(size, MOST_KEPT_BYTES), 0)
            os.ftruncate(_kept(), 0)
            os.lseek(_kept(), 0, os.SEEK_SET)
            sys.stderr.buffer.write(text)
            sys.stderr.flush()

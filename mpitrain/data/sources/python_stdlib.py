"""The source code of Python's own standard library: real text on every machine, with nothing to download."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from mpitrain.data.source import Bundled, Document, File, Position, Source
from mpitrain.data.sources.text import whole_text

# tests hold odd encodings on purpose; installed packages and customisation differ by machine
STDLIB_WITHOUT = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"),
    *("sitecustomize.py", "usercustomize.py"),
}


def read(file: File, begin: Position, text_key: str) -> Iterator[Document]:
    """Yield the one document of a file."""
    yield whole_text(file, begin)


def stdlib() -> Path:
    """Return the folder of this Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_of_one_host(name: str) -> bool:
    """Return whether not every installation has a file; _sysconfigdata and config-* are for one host."""
    return name in STDLIB_WITHOUT or name.startswith((".", "_sysconfigdata", "config-"))


PYTHON_STDLIB = Source(
    "python-stdlib",
    read,
    suffixes=(".py",),
    most_bytes=1 << 30,
    excludes=is_of_one_host,
    bundled=Bundled(stdlib, 'this Python came without its sources; use data.source = "text"'),
)

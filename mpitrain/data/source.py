"""A source: how files become documents. One object, in one file of data/sources/ or in a module of the
user's own (plugins.py).

It says which files it reads and what documents they hold: text, or ids that are tokens already.
Nobody else knows sources by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
from msgspec import Meta

from mpitrain.plugins import Catalog

if TYPE_CHECKING:
    import numpy as np

NO_TEXT = "without text"


class File(NamedTuple):
    """name: within the corpus, for messages.  chosen: it was named itself, and not found in a folder."""

    name: str
    path: Path
    chosen: bool = False


class Position(msgspec.Struct, frozen=True):
    """Where a document ends: in how many files before this one all is read, and how much of this
    one, in bytes and lines.
    """

    files: Annotated[int, Meta(ge=0)] = 0
    offset: Annotated[int, Meta(ge=0)] = 0
    lines: Annotated[int, Meta(ge=0)] = 0


BEGIN = Position()


class Document(NamedTuple):
    """text: in UTF-8, to be tokenized.

    after: where the next one begins.
    left_out: why there is nothing in it, if there is nothing.
    file: its number.
    ids: its tokens, integers [n], in place of a text; without those that go between documents and
    before each, which data.end_of_text and data.begin_of_text say.
    markup: the format of a text that is read as it stands, such as "HTML"; "" for plain text.
    """

    name: str
    text: bytes
    after: Position
    left_out: str = ""
    file: int = 0
    ids: np.ndarray | None = None
    markup: str = ""

    @property
    def num_bytes(self) -> int:
        """Return how many bytes its text or its ids have; 0: there is nothing in it."""
        return len(self.text) if self.ids is None else self.ids.nbytes

    def emptied(self) -> Document:
        return self._replace(text=b"", ids=None)


class Damaged(Exception):
    """What is wrong with a file, for a message that names it. Later files are read for what is wrong only."""


class Bundled(NamedTuple):
    """A corpus that is on every machine: there is no data.path to it.

    root: returns its folder.  if_absent: why there may be none, and what to do.
    """

    root: Callable[[], Path]
    if_absent: str


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden by its name."""
    return name.startswith(".")


@dataclass(frozen=True)
class Source:
    """A form of files, and how it is read.

    name: value of data.source, of a source in data/sources/.
    read: yields the documents of a file from a position within it on, always the same in the same
    order, given data.text_key. Raises Damaged, and OSError.
    suffixes: of the files that are read of a folder, in any case.
    most_bytes: of a file.
    excludes: tells by their names which files and folders in a folder are no part of a corpus.
    wanted: what should lie under data.path, for a message.
    advice: what to do about a damaged file; `{text_key}` stands for that key.
    keyed: data.text_key decides what is read.
    bundled: the corpus, if it has one of its own.
    version: is raised when the same files give other documents; tokens prepared before are made
    anew then.
    """

    name: str
    read: Callable[[File, Position, str], Iterator[Document]]
    suffixes: tuple[str, ...] = ("",)
    most_bytes: int = 1 << 50
    excludes: Callable[[str], bool] = is_hidden
    wanted: str = "a file with text"
    advice: str = (
        "convert it or move it out of data.path, or choose files by a pattern, such as data.path = "
        '"folder/**/*.txt"'
    )
    keyed: bool = False
    bundled: Bundled | None = None
    version: int = 1

    def identity(self, named: str) -> str:
        """Return what prepared tokens note of the source that a run names so."""
        return named if self.version == 1 else f"{named}, version {self.version}"


SOURCES = Catalog("data.source", "mpitrain.data.sources", Source, "a Source (mpitrain/data/source.py)")

"""A source: which files it reads, and what documents they hold: text, or ids that are tokens already.

It is one object, in one file of data/sources/ or in a module of the user's own (plugins.py). Nobody
else knows sources by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from mpitrain.plugins import Catalog

if TYPE_CHECKING:
    import numpy as np

    from mpitrain.data.conversations import Conversations

NO_TEXT = "without text"


class File(NamedTuple):
    """name: within the corpus, for messages.  chosen: it was named itself, and not found in a folder.

    companions: other files that belong to it, such as an index of its documents.
    """

    name: str
    path: Path
    chosen: bool = False
    companions: tuple[Path, ...] = ()


class Position(msgspec.Struct, frozen=True):
    """Where a document ends: how many files before this one are read, and how much of this one, in bytes
    and lines.
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
    scored: of each of its ids, whether it carries loss as a target, bool [n]; None: all do.
    damage: what is wrong with it, and where, if it can't be read; data.damaged says how many may be.
    remark: what its file has that is unusual and was put right.
    complete: its ids have their begin and end of text; no token goes before or after them.
    """

    name: str
    text: bytes
    after: Position
    left_out: str = ""
    file: int = 0
    ids: np.ndarray | None = None
    markup: str = ""
    scored: np.ndarray | None = None
    damage: str = ""
    remark: str = ""
    complete: bool = False

    @property
    def num_bytes(self) -> int:
        """Return how many bytes its text or its ids have; 0: there is nothing in it."""
        return len(self.text) if self.ids is None else self.ids.nbytes

    def emptied(self) -> Document:
        return self._replace(text=b"", ids=None, scored=None)


class TokenRule(NamedTuple):
    """How ids are read. end: what ends a document, where no index does; None: nothing.

    end_of_text, begin_of_text: of the run's tokenizer, which has `vocab` ids.
    dtype: of ids in files that don't say it; "": as is usual for their format.
    conversations: makes ids of conversations; None: nobody asks for any.
    """

    end: int | None = None
    end_of_text: int | None = None
    begin_of_text: int | None = None
    vocab: int = 1 << 62
    dtype: str = ""
    conversations: Conversations | None = None


class Numbers(Protocol):
    """Numbers in a file, read where they are asked for (token_files.StoredArray)."""

    dtype: np.dtype
    count: int

    def read(self, first: int, last: int) -> np.ndarray: ...


class TokenFile(NamedTuple):
    """The ids of a file. scored, remark: as Document has them.

    ends: of its documents, ascending, the last one the number of ids; None: a token ends them.
    """

    ids: Numbers
    ends: np.ndarray | None = None
    scored: Numbers | None = None
    remark: str = ""


class Damaged(Exception):
    """What is wrong with a file, for a message that names it. Later files are read for what is wrong only."""


class Bundled(NamedTuple):
    """A corpus of every machine, in the folder that `root` returns. if_absent: why there may be none."""

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
    tokens: in place of `read`, the ids of a file and where its documents end. Raises likewise.
    converse: in place of both, the conversations of a file from a position on, as documents whose
    answers carry loss. Raises likewise.
    choose: in place of all, returns the source of a file, by its first bytes. Raises likewise.
    companions: the files that may belong to a file; those that exist are no files of their own.
    main: returns the file that a path names, itself or by a companion.
    files_in: returns the files of a folder that lists them itself; None: it is read as any other.
    Raises DataError.
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
    read: Callable[[File, Position, str], Iterator[Document]] | None = None
    suffixes: tuple[str, ...] = ("",)
    most_bytes: int = 1 << 60
    excludes: Callable[[str], bool] = is_hidden
    wanted: str = "a file with text"
    advice: str = (
        "convert it or move it out of data.path, or choose files by a pattern, such as data.path = "
        '"folder/**/*.txt"'
    )
    keyed: bool = False
    bundled: Bundled | None = None
    version: int = 1
    tokens: Callable[[File, TokenRule], TokenFile] | None = None
    choose: Callable[[File], Source] | None = None
    converse: Callable[[File, Position, Conversations], Iterator[Document]] | None = None
    companions: Callable[[Path], Sequence[Path]] = lambda path: ()
    main: Callable[[Path], Path] = lambda path: path
    files_in: Callable[[Path], Sequence[Path] | None] | None = None

    @property
    def holds_tokens(self) -> bool:
        """Return whether the rule of a run's tokenizer may decide what documents there are."""
        return self.tokens is not None or self.choose is not None

    def identity(self, named: str) -> str:
        """Return what prepared tokens note of the source that a run names so."""
        return named if self.version == 1 else f"{named}, version {self.version}"


SOURCES = Catalog("data.source", "mpitrain.data.sources", Source, "a Source (mpitrain/data/source.py)")

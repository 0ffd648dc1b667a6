"""What prepared tokens were made from, and what was read for them: parts of tokens.json and of a draft."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from mpitrain.errors import counted
from mpitrain.inputs import replacing, shown

TOKENS = "tokens.bin"
ENDS = "ends.bin"
UNSCORED = "unscored.bin"
NUMBERS = TOKENS, ENDS, UNSCORED
ENDS_DTYPE = np.dtype("<i8")
OWN = 2  # names that are a run's own: data/tokens.bin; none of them may be a link
MOST_BYTES = 1 << 16  # of a description, which has 700
# of what is made of a text; 1: special tokens were found in it, and a document ended at each token
# that was end_of_text
FORM = 2

ADVICE = ', marks and all; data.source = "jsonl" reads the texts of JSON lines'
Count = Annotated[int, Meta(ge=1, le=2**62)]
CountOrNone = Annotated[int, Meta(ge=0, le=2**62)]


class Origin(msgspec.Struct, frozen=True):
    """What the tokens were made from.

    files: fingerprint of the corpus.
    tokenizer: Tokenizer.identity.
    end_of_text, begin_of_text: what goes between two documents, and before each.
    """

    source: str
    path: str
    files: str
    tokenizer: str
    vocab: Count
    form: int = 1
    end_of_text: CountOrNone | None = None
    text_key: str = ""
    begin_of_text: CountOrNone | None = None
    validation_files: CountOrNone = 0  # of the files, the last ones: those of data.val_path
    rule: str = ""  # data.ends and data.dtype, where files of ids may need them
    damaged: CountOrNone = 0  # data.damaged

    def gives_the_same_as(self, other: "Origin") -> bool:
        """Return whether tokens made from both are the same. Where the corpus lies makes no difference."""
        return msgspec.structs.replace(self, path=other.path) == other


class LeftOut(msgspec.Struct, frozen=True):
    """How many documents there were of a kind, or left out for one reason. first: the name of one."""

    count: CountOrNone
    first: str


class ReadCounts(msgspec.Struct, frozen=True):
    """What was read. size: bytes of text.  unknown: tokens for what the tokenizer doesn't know.

    By their kinds: left_out; marked, whose marks of another format were read as text; remarks,
    files with something unusual that was put right.
    """

    documents: CountOrNone = 0
    size: CountOrNone = 0
    unknown: CountOrNone = 0
    files: CountOrNone = 0
    training: CountOrNone | None = None  # documents before those of data.val_path; None: there is none
    left_out: dict[str, LeftOut] = {}
    marked: dict[str, LeftOut] = {}
    remarks: dict[str, LeftOut] = {}
    parts: tuple[CountOrNone, ...] = ()  # documents of each source of a mixture; empty: there is only one

    def with_part(self, part: int, of: int) -> "ReadCounts":
        """Count a document of a source, of so many sources."""
        if of == 1:
            return self
        counts = list(self.parts or (0,) * of)
        counts[part] += 1
        return msgspec.structs.replace(self, parts=tuple(counts))

    def with_document(self, size: int, unknown: int) -> "ReadCounts":
        counts = dict(documents=self.documents + 1, size=self.size + size, unknown=self.unknown + unknown)
        return msgspec.structs.replace(self, **counts)

    def with_named(self, field: str, kind: str, names: Sequence[str]) -> "ReadCounts":
        """Count what has these names in `left_out`, `marked` or `remarks`."""
        counts: dict[str, LeftOut] = getattr(self, field)
        before = counts.get(kind, LeftOut(0, shown(names[0])))
        more = LeftOut(before.count + len(names), before.first)
        return msgspec.structs.replace(self, **{field: {**counts, kind: more}})

    def describe(self, count: int) -> str:
        """Return what was read, in one line. count: of tokens."""
        files, documents = counted(self.files, "files", ","), counted(self.documents, "documents", ",")
        read = f"{files}, {documents}, {counted(self.size, 'bytes', ',')}, {counted(count, 'tokens', ',')}"
        if self.unknown:
            read += f"; {self.unknown:,} tokens ({self.unknown / count:.1%}) are unknown to the tokenizer"
        if self.marked:
            read += f"; read as plain text: {_listed(self.marked)}{ADVICE}"
        if self.remarks:
            read += f"; read: {_listed(self.remarks)}"
        return f"{read}; left out: {_listed(self.left_out) or 'nothing'}"


def write_struct(path: Path, content: msgspec.Struct) -> None:
    """Write a file of the run's own as JSON, under its name once it is whole. Raises OSError."""
    with replacing(path, OWN) as file:
        file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def _listed(found: dict[str, LeftOut]) -> str:
    return ", ".join(f"{each.count:,} {shown(what)} ({shown(each.first)})" for what, each in found.items())

"""What prepared tokens were made from, and what was read for them.

The parts of tokens.json and of what is kept of a draft.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from mpitrain.errors import counted
from mpitrain.inputs import shown

TOKENS = "tokens.bin"
ENDS = "ends.bin"
UNSCORED = "unscored.bin"
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
    """What was read.

    size: bytes of text.
    unknown: tokens that stand for what the tokenizer doesn't know.
    left_out: by reason.
    """

    documents: CountOrNone = 0
    size: CountOrNone = 0
    unknown: CountOrNone = 0
    files: CountOrNone = 0
    # documents before those of data.val_path; None: there is no such path
    training: CountOrNone | None = None
    left_out: dict[str, LeftOut] = {}
    # of documents whose marks of another format were read as text, by that format
    marked: dict[str, LeftOut] = {}
    # of files that had something unusual, which was put right
    remarks: dict[str, LeftOut] = {}

    # documents of each source of a mixture; empty: there is only one
    parts: tuple[CountOrNone, ...] = ()

    def with_part(self, part: int, of: int) -> "ReadCounts":
        """Count a document of a source, of so many sources."""
        if of == 1:
            return self
        counts = list(self.parts or (0,) * of)
        counts[part] += 1
        return msgspec.structs.replace(self, parts=tuple(counts))

    def with_remark(self, remark: str, name: str) -> "ReadCounts":
        """Count a file with something unusual."""
        return self._counted("remarks", remark, [name])

    def with_document(self, size: int, unknown: int) -> "ReadCounts":
        counts = dict(documents=self.documents + 1, size=self.size + size, unknown=self.unknown + unknown)
        return msgspec.structs.replace(self, **counts)

    def without(self, reason: str, names: Sequence[str]) -> "ReadCounts":
        return self._counted("left_out", reason, names)

    def with_marked(self, markup: str, name: str) -> "ReadCounts":
        """Count a document that is of another format than text."""
        return self._counted("marked", markup, [name])

    def _counted(self, field: str, kind: str, names: Sequence[str]) -> "ReadCounts":
        counts: dict[str, LeftOut] = getattr(self, field)
        before = counts.get(kind, LeftOut(0, shown(names[0])))
        more = LeftOut(before.count + len(names), before.first)
        return msgspec.structs.replace(self, **{field: {**counts, kind: more}})

    def describe(self, count: int) -> str:
        """Return what was read, in one line. count: of tokens."""
        files, documents = counted(self.files, "files", ","), counted(self.documents, "documents", ",")
        read = f"{files}, {documents}, {counted(self.size, 'bytes', ',')}, {counted(count, 'tokens', ',')}"
        unknown = (
            f"; {self.unknown:,} tokens ({self.unknown / count:.1%}) are unknown to the tokenizer"
            if self.unknown
            else ""
        )
        as_text = f"; read as plain text: {_listed(self.marked)}{ADVICE}" if self.marked else ""
        as_text += f"; read: {_listed(self.remarks)}" if self.remarks else ""
        return f"{read}{unknown}{as_text}; left out: {_listed(self.left_out) or 'nothing'}"


def _listed(found: dict[str, LeftOut]) -> str:
    return ", ".join(f"{each.count:,} {shown(what)} ({shown(each.first)})" for what, each in found.items())

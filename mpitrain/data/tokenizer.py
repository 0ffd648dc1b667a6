"""Text to token ids and back: plain bytes, or a tokenizers JSON file (tokenizer_file.py)."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from mpitrain.config import Data
from mpitrain.errors import DataError
from mpitrain.inputs import shown

# the latter is no UTF-8 for anything: modified UTF-8, as Java has it
NUL = b"\0"
ESCAPED_NUL = b"\xc0\x80"


class Tokenizer(Protocol):
    """Ids are below `vocab`, and those of texts below `needed`; `identity` is equal when the ids would be.

    end_of_text: goes between two documents, and is the id of no text; None: nothing does.
    begin_of_text: the same, before each.
    older_end_of_text: that of tokens of form 1.
    unknown: the id of what it has no token for.
    stray_byte: with byte fallback, the id of a byte that can't begin a character; None: a text's
    last character alone can still change.
    description: which these are, for a line.
    memory_per_byte: what it takes for each byte of a text, at most.
    memory: what it takes itself, about.
    """

    vocab: int
    needed: int
    end_of_text: int | None
    begin_of_text: int | None
    older_end_of_text: int | None
    unknown: int | None
    stray_byte: int | None
    identity: str
    description: str
    memory_per_byte: int
    memory: int

    def pieces(self, text: bytes) -> Iterator[bytes]:
        """Yield the pieces of a long text, whose ids are those of the whole, one after the other."""

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of UTF-8 `text`, [tokens], of type `dtype_for(vocab)`; never of control tokens."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...

    def files(self) -> dict[str, bytes]:
        """Return the files, by name, from which load_tokenizer() and tokenizer_from() make the same one."""


class Vocabulary(NamedTuple):
    """What all ranks have to know of a tokenizer, which one of them has: see Tokenizer."""

    vocab: int
    needed: int
    end_of_text: int | None
    begin_of_text: int | None
    older_end_of_text: int | None
    identity: str
    description: str


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(*(getattr(tokenizer, name) for name in Vocabulary._fields))


def load_tokenizer(
    name: str | Path, end_of_text: str | None = None, begin_of_text: str | None = None
) -> Tokenizer:
    """Return the tokenizer that data.tokenizer names: "bytes", or the path of a tokenizers JSON file.

    end_of_text, begin_of_text: names of these tokens; "": none; None: as the model was trained.
    """
    if name == "bytes":
        return ByteTokenizer(end_of_text, begin_of_text)
    if not name:
        raise DataError(
            'data.tokenizer = "": the weights were imported without a tokenizer; give the one that the model '
            'was trained with, by data.tokenizer (generate: --tokenizer FILE), or "bytes"'
        )
    from mpitrain.data.tokenizer_file import read_tokenizer

    return read_tokenizer(Path(name), end_of_text, begin_of_text)


def tokenizer_from(files: Mapping[str, bytes], data: Data) -> Tokenizer:
    """Return the tokenizer of a configuration from Tokenizer.files(), which another rank has read."""
    if data.tokenizer == "bytes":
        return tokenizer_of(data)
    from mpitrain.data.tokenizer_file import tokenizer_in

    return tokenizer_in(files, Path(data.tokenizer), data.end_of_text, data.begin_of_text)


def tokenizer_of(data: Data) -> Tokenizer:
    """Return the tokenizer of a configuration."""
    return load_tokenizer(data.tokenizer, data.end_of_text, data.begin_of_text)


def separator(data: Data, tokenizer: Tokenizer | Vocabulary) -> int | None:
    """Return the token that ends a document; None if documents are joined. Raises DataError for none."""
    if data.documents != "separate":
        return None
    if tokenizer.end_of_text is None:
        raise DataError(
            'data.documents = "separate" needs a token between documents, data.tokenizer = '
            f'"{shown(data.tokenizer)}" has no special token that is known for it; name one by '
            'data.end_of_text, use another tokenizer, or data.documents = "joined"'
        )
    return tokenizer.end_of_text


class ByteTokenizer:
    """A token is a byte. Byte 0 stands between documents; U+0000 of a text is written in two others."""

    vocab = needed = 256
    older_end_of_text = 0
    begin_of_text = unknown = stray_byte = None
    identity = "bytes"
    memory_per_byte, memory = 4, 0

    def __init__(self, end_of_text: str | None = None, begin_of_text: str | None = None):
        for key, name in (("data.end_of_text", end_of_text), ("data.begin_of_text", begin_of_text)):
            if name:
                found = f'{key} = "{shown(name)}": data.tokenizer = "bytes" has no tokens with names'
                raise DataError(f'{found}; leave it out for byte 0 between documents, or "" for none')
        self.end_of_text = None if end_of_text == "" else 0
        self.description = "nothing between documents" if end_of_text == "" else "byte 0 between documents"

    def files(self) -> dict[str, bytes]:
        return {}

    def pieces(self, text: bytes) -> Iterator[bytes]:
        yield text

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text.replace(NUL, ESCAPED_NUL), np.uint8)

    def decode(self, ids) -> str:
        found = bytes(np.asarray(ids).tolist())  # tolist: an id over 255 raises instead of wrapping
        return found.replace(ESCAPED_NUL, NUL).decode(errors="replace")

"""Turn the documents of a corpus into ids: in pieces, shares of them on any rank, in the order of the corpus.

documents  one   a long one   three        cutting.py cuts the long one
shares     [one, a lo] [ng on] [e, three]  of SHARE_BYTES at most
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mpitrain.data.cutting import MEMORY_PER_BYTE, PIECE_BYTES
from mpitrain.data.memory_left import shortage
from mpitrain.data.source import Document
from mpitrain.data.token_dtype import dtype_for
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import DataError
from mpitrain.inputs import shown

SHARE_BYTES = PIECE_BYTES
DOCUMENT_BYTES = 128  # what a document takes of a share besides its text
Texts = Sequence[bytes]


class Encoder(Protocol):
    """Yields the ids of the texts of each share, in order; it may read shares ahead of what it yields.

    num_ranks: on which it encodes.
    """

    num_ranks: int

    def __call__(self, shares: Iterable[Texts]) -> Iterator[list[np.ndarray]]: ...


class LocalEncoder:
    """Encodes on this rank."""

    num_ranks = 1

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def __call__(self, shares: Iterable[Texts]) -> Iterator[list[np.ndarray]]:
        for share in shares:
            yield list(map(self._tokenizer.encode, share))


class DocumentPiece(NamedTuple):
    """A part of a document. text: empty if it has ids.  is_last: the document ends with it."""

    document: Document
    text: bytes
    is_last: bool

    @property
    def num_bytes(self) -> int:
        """Return what it takes of a share, an empty document, too."""
        return (len(self.text) if self.document.ids is None else self.document.num_bytes) + DOCUMENT_BYTES


def encoded(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    encoder: Encoder,
    each: Callable[[DocumentPiece], object] = lambda piece: None,
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yield each document with its ids, in their order. each: called with each piece that is encoded.

    Raises DataError for ids of a source that can't be the tokenizer's.
    """
    parts = list[np.ndarray]()
    read = deque[list[DocumentPiece]]()
    for found in encoder(_texts(_shares(_pieces(documents, tokenizer)), read)):
        ids = iter(found)
        for piece in read.popleft():
            if piece.text:
                parts.append(next(ids))
            each(piece)
            if piece.is_last:
                yield piece.document, _ids_of(piece.document, parts, tokenizer)
                parts = []


def _texts(shares: Iterable[list[DocumentPiece]], read: deque[list[DocumentPiece]]) -> Iterator[Texts]:
    """Yield the texts of each share, and append its pieces to `read`."""
    for share in shares:
        read.append(share)
        yield [piece.text for piece in share if piece.text]


def _ids_of(document: Document, parts: list[np.ndarray], tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of a document: its own, or those of the pieces of its text."""
    if document.ids is not None:
        return _given_ids(document.name, np.asarray(document.ids), tokenizer)
    return parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty(0, np.uint8)])


def _given_ids(name: str, ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return ids of a source as the tokenizer would have made them."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        found = f"ids of type {ids.dtype} and {ids.ndim} dimensions"
        raise DataError(f"data.path: {shown(name)} has {found}, needed integers in a row; fix the source")
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab:
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        token = f"token {wrong}, the tokenizer has {tokenizer.vocab}"
        advice = "give the one that made these tokens (data.tokenizer)"
        raise DataError(f"data.path: {shown(name)} has {token}; {advice}")
    return ids.astype(dtype_for(tokenizer.vocab))


def _pieces(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[DocumentPiece]:
    for document in documents:
        before = b""
        for text in tokenizer.pieces(document.text):
            if before:
                yield DocumentPiece(document, before, False)
            _require_memory(document.name, text, tokenizer)
            before = text
        yield DocumentPiece(document, before, True)


def _require_memory(name: str, text: bytes, tokenizer: Tokenizer) -> None:
    """Raise DataError if a text that can't be cut takes more memory than there is."""
    needed = len(text) * tokenizer.memory_per_byte
    if needed > MEMORY_PER_BYTE * 4 * PIECE_BYTES and (lacking := shortage(needed)):
        raise DataError(
            f"data.path: {shown(name)} has {len(text):,} bytes that this tokenizer can't be given in pieces: "
            f"{lacking}; divide the document, or use another data.tokenizer"
        )


def _shares(pieces: Iterable[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
    """Yield shares of SHARE_BYTES at most; a longer piece is a share by itself."""
    share = list[DocumentPiece]()
    size = 0
    for piece in pieces:
        if share and size + piece.num_bytes > SHARE_BYTES:
            yield share
            share, size = [], 0
        share.append(piece)
        size += piece.num_bytes
    if share:
        yield share

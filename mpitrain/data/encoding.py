"""Turn the documents of a corpus into ids: in pieces, a share for each rank, in the order of the corpus.

documents  one   a long one   three        cutting.py cuts the long one
shares     [one, a lo] [ng on] [e, three]  of SHARE_BYTES at most; a round has one for each rank
"""

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
# what a document takes of a share besides its text
DOCUMENT_BYTES = 128

Texts = Sequence[bytes]


class Encoder(Protocol):
    """Encodes several shares at once, one on each rank that takes part."""

    num_shares: int

    def __call__(self, shares: Sequence[Texts]) -> list[list[np.ndarray]]: ...


class LocalEncoder:
    """Encodes on this rank."""

    num_shares = 1

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def __call__(self, shares: Sequence[Texts]) -> list[list[np.ndarray]]:
        return [encode_share(self._tokenizer, share) for share in shares]


class DocumentPiece(NamedTuple):
    """A part of a document. is_last: the document ends with it.

    text: empty of a document that has ids.
    """

    document: Document
    text: bytes
    is_last: bool

    @property
    def num_bytes(self) -> int:
        """Return what it takes of a share. There may be millions of empty documents."""
        return (len(self.text) if self.document.ids is None else self.document.num_bytes) + DOCUMENT_BYTES


def encode_share(tokenizer: Tokenizer, share: Texts) -> list[np.ndarray]:
    """Return the ids of each text."""
    return [tokenizer.encode(text) for text in share]


def encoded(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    encoder: Encoder,
    each: Callable[[DocumentPiece], object] = lambda piece: None,
) -> Iterator[tuple[Document, np.ndarray]]:
    """Yield each document with its ids, in their order.

    each: called with each piece that is encoded.

    Raises DataError for ids of a source that can't be the tokenizer's.
    """
    parts = list[np.ndarray]()
    for shares in _rounds(_pieces(documents, tokenizer), encoder.num_shares):
        found = encoder([[piece.text for piece in share if piece.text] for share in shares])
        ids = (part for parts in found for part in parts)
        for piece in (piece for share in shares for piece in share):
            if piece.text:
                parts.append(next(ids))
            each(piece)
            if piece.is_last:
                yield piece.document, _ids_of(piece.document, parts, tokenizer)
                parts = []


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
        raise DataError(
            f"data.path: {shown(name)} has token {wrong}, the tokenizer has {tokenizer.vocab}; give the one "
            "that made these tokens (data.tokenizer)"
        )
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
    if needed <= MEMORY_PER_BYTE * 4 * PIECE_BYTES:
        return
    if lacking := shortage(needed):
        raise DataError(
            f"data.path: {shown(name)} has {len(text):,} bytes that this tokenizer can't be given in pieces: "
            f"{lacking}; divide the document, or use another data.tokenizer"
        )


def _rounds(pieces: Iterable[DocumentPiece], num_shares: int) -> Iterator[list[list[DocumentPiece]]]:
    """Yield shares of SHARE_BYTES at most, `num_shares` together; a longer piece is a share by itself."""
    shares = [list[DocumentPiece]()]
    size = 0
    for piece in pieces:
        if shares[-1] and size + piece.num_bytes > SHARE_BYTES:
            if len(shares) == num_shares:
                yield shares
                shares = []
            shares.append([])
            size = 0
        shares[-1].append(piece)
        size += piece.num_bytes
    if shares[-1]:
        yield shares

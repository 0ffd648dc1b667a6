"""What prepared tokens hold: lengths of documents, duplicates, and what is wrong with them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash

SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)  # of the documents, for quantiles of their lengths
CONSTANT_SHARE = 0.9  # of a document's tokens that are the same one
LEAST_TOKENS = 16  # of a document that is looked at for that


class CorpusStatistics(NamedTuple):
    """lengths: of documents in tokens, by SHARES.

    duplicates: documents with the tokens of an earlier one.
    most_copies: how often the most frequent document comes; example: its number.
    double_begins: documents that begin with two begins of text, and the first of them; -1: none.
    constant: documents of which CONSTANT_SHARE is one token, and the first of them; likewise.
    """

    documents: int
    tokens: int
    lengths: tuple[int, ...]
    duplicates: int
    most_copies: int
    example: int
    double_begins: tuple[int, int]
    constant: tuple[int, int]


def statistics_of(
    tokens: np.ndarray,
    ends: np.ndarray,
    end_of_text: int | None,
    begin_of_text: int | None,
    each: Callable[[int], object] = lambda document: None,
) -> CorpusStatistics:
    """Read all documents once, in memory of 18 bytes for each. each: called with its number."""
    lengths = np.diff(ends, prepend=0)
    hashes = np.empty(len(ends), np.uint64)
    double, constant = np.zeros((2, len(ends)), bool)
    for number, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
        each(number)
        ids = np.asarray(tokens[end - length : end])
        if end_of_text is not None and ids.size and int(ids[-1]) == end_of_text:
            ids = ids[:-1]
        hashes[number] = xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids))
        double[number] = begin_of_text is not None and (ids[:2] == begin_of_text).tolist() == [True, True]
        constant[number] = _is_constant(ids)
    _, firsts, counts = np.unique(hashes, return_index=True, return_counts=True)
    most = int(np.argmax(counts))
    places = np.quantile(lengths, SHARES, method="lower").tolist()
    return CorpusStatistics(
        len(ends),
        int(ends[-1]),
        tuple(places),
        len(ends) - len(counts),
        int(counts[most]),
        int(firsts[most]),
        _count_and_first(double),
        _count_and_first(constant),
    )


def _is_constant(ids: np.ndarray) -> bool:
    """Return whether most of a document is one token; it is their median then."""
    if ids.size < LEAST_TOKENS:
        return False
    middle = np.partition(ids, ids.size // 2)[ids.size // 2]
    return bool((ids == middle).mean() >= CONSTANT_SHARE)


def _count_and_first(are: np.ndarray) -> tuple[int, int]:
    return int(are.sum()), int(are.argmax()) if are.any() else -1

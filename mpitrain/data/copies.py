"""Find copies of held-out documents: trained on, they would make a validation on known text."""

import numpy as np

from mpitrain.data.read_tokens import Tokens
from mpitrain.data.split import are_within

PLACES = 8  # tokens of a document that are compared first, evenly spread over it


def copies_of(tokens: Tokens, ends: np.ndarray, held_out: np.ndarray, num_between: int) -> np.ndarray:
    """Return which documents have the tokens of a held-out one, and aren't held out.

    ends: of all documents.  held_out: stretches [n, 2] of tokens, in their order.
    num_between: tokens that end a document, of which the last one of a corpus has none.
    """
    begins = np.concatenate([[0], ends[:-1]])
    lengths = ends - begins - num_between
    lengths[-1] += num_between
    is_held_out = are_within(begins, ends, held_out)
    candidates = np.flatnonzero(np.isin(lengths, lengths[is_held_out]) & (lengths > 0))
    marks = _marks(tokens, begins[candidates], lengths[candidates])
    of_held_out = is_held_out[candidates]
    originals = dict[int, list[int]]()
    for mark, number in zip(marks[of_held_out].tolist(), candidates[of_held_out].tolist(), strict=True):
        originals.setdefault(mark, []).append(number)
    alike = np.isin(marks, marks[of_held_out]) & ~of_held_out

    def text(number: int) -> np.ndarray:
        return tokens[begins[number] : begins[number] + lengths[number]]

    def is_copy(mark: int, number: int) -> bool:
        own = text(number)
        return any(np.array_equal(own, text(one)) for one in originals[mark])

    pairs = zip(marks[alike].tolist(), candidates[alike].tolist(), strict=True)
    return np.array([number for mark, number in pairs if is_copy(mark, number)], np.int64)


def _marks(tokens: Tokens, begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return a number for each document, equal for equal ones: of its length and some of its tokens."""
    marks = lengths.astype(np.uint64)
    for place in range(PLACES):
        at = begins + (lengths - 1) * place // (PLACES - 1)
        marks = (marks ^ tokens[at].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        marks ^= marks >> np.uint64(29)
    return marks

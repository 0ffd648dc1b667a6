"""Where documents lie in rows that several share, as spans whose attention is computed one by one.

A mask over whole rows costs as if all positions saw each other. A span is one document, or some
short ones side by side under a mask of their own: many small products would cost more than they save.

    documents  0 0 0 0 0 1 1 2 2 2    spans, of 5 positions at least    queries 0 to 4, causal
                                                                        queries 5 to 9, masked

Which spans there are is a function of the documents alone: the same rows have the same bits. The
positions of a document are side by side.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

LEAST = 128  # positions of a span, unless a document or the row is shorter


class DocumentSpan(NamedTuple):
    """Queries and keys of one sequence, of one document or of several. Queries are the last of the keys.

    documents: the document of each key, [keys]; None: it is one.
    """

    sequence: int
    queries: slice
    keys: slice
    documents: torch.Tensor | None = None

    def of(self, x_BHXC: torch.Tensor, positions: slice) -> torch.Tensor:
        """Return a view of some positions of the sequence, [1, H, positions, ...]."""
        return x_BHXC[self.sequence : self.sequence + 1, :, positions]

    def visible(self) -> torch.Tensor | None:
        """Return what documents let queries see, bool [queries, keys]; None: all."""
        if self.documents is None:
            return None
        return self.documents[-self.num_queries :, None] == self.documents

    @property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start

    @property
    def num_keys(self) -> int:
        return self.keys.stop - self.keys.start


Spans = Sequence[DocumentSpan]


def spans_of(documents_BT: torch.Tensor, begin: int = 0, end: int | None = None) -> Spans:
    """Return the spans of the queries of positions [begin, end), with the keys of all before.

    documents_BT: on a CPU; numbers of documents in whole sequences.
    """
    end = documents_BT.shape[1] if end is None else end
    found = list[DocumentSpan]()
    for sequence, documents_T in enumerate(documents_BT[:, :end]):
        runs = [run for run in _runs_of(documents_T.numpy()) if run[1] > begin]
        for span in _joined(runs):
            keys = slice(span[0][0], span[-1][1])
            queries = slice(max(keys.start - begin, 0), keys.stop - begin)
            documents = documents_T[keys] if len(span) > 1 else None
            found.append(DocumentSpan(sequence, queries, keys, documents))
    return tuple(found)


def spans_between(queries_Bt: torch.Tensor, keys_BS: torch.Tensor) -> Spans:
    """Return the spans of queries, and of some keys that are all before them and of the same documents.

    queries_Bt, keys_BS: the document of each, in ascending order, on a CPU.
    """
    found = list[DocumentSpan]()
    for sequence, (queries_t, keys_S) in enumerate(zip(queries_Bt.numpy(), keys_BS.numpy(), strict=True)):
        of_keys = {int(keys_S[run[0]]): run for run in _runs_of(keys_S)}
        runs = [run for run in _runs_of(queries_t) if int(queries_t[run[0]]) in of_keys]
        for span in _joined(runs):
            first, last = (of_keys[int(queries_t[run[0]])] for run in (span[0], span[-1]))
            keys = slice(first[0], last[1])
            documents = queries_Bt[sequence] if len(span) > 1 else None
            found.append(DocumentSpan(sequence, slice(span[0][0], span[-1][1]), keys, documents))
    return tuple(found)


def _runs_of(documents_T: np.ndarray) -> list[tuple[int, int]]:
    """Return begin and end of each document."""
    cuts = (np.flatnonzero(np.diff(documents_T)) + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(documents_T)], strict=True))


def _joined(runs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the documents of each span: a long one, or short ones until they have LEAST positions."""
    span = list[tuple[int, int]]()
    for first, last in runs:
        if span and max(last - first, first - span[0][0]) >= LEAST:
            yield span
            span = []
        span.append((first, last))
    if span:
        yield span

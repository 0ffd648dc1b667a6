"""Causal attention in 16 bits on a CPU by matrix products.

Some queries at a time, so that their scores stay in the cache.

B sequences, H query heads, K key-value heads (K divides H), G = H / K that share keys, T queries, S
keys, C width of a head. A piece is R queries of some key-value heads: rows [R G, C], the heads of
one position side by side, as the projection left them.

Faster than torch's own attention in bf16 on a CPU, most of all its backward. In fp16 that backward
takes ten times as long as this, but for processors that multiply fp16 themselves, on which this is
slower; in fp32 it isn't faster (benchmarks/attention.py). Scores are rounded to the type of the
queries, as torch's products are; softmax is taken in fp32 at least, and rounded. Neither the result
nor the log-sum-exp is needed for the backward: the probabilities are kept, or made again. Where the
processor multiplies in fp32 instead (kernels/processor.py), rows and keys are widened first, and
scores aren't rounded.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from mpitrain.kernels.precision import wide
from mpitrain.kernels.processor import multiplied_as
from mpitrain.plan.declared import probabilities

ROWS = {2: probabilities.ROWS, 4: 64, 8: 64}  # queries of a piece, by bytes of a number
# keys from which on a piece of 16-bit queries, whose head shares its keys with no other, has twice
# as many
LONG = 1024
SCORES = probabilities.SCORES


def fits(q: torch.Tensor) -> bool:
    """Return whether this is faster than torch's own attention for queries of this kind."""
    return q.is_cpu and (
        q.dtype == torch.bfloat16 or (q.dtype == torch.float16 and multiplied_as(q.dtype) != q.dtype)
    )


def keeps(q: torch.Tensor, visible: torch.Tensor | None) -> bool:
    """Return whether the probabilities are to be kept for the backward, if anything is.

    Memory is planned by that.
    """
    return visible is None and q.dtype == torch.bfloat16 and probabilities.are_kept(*q.shape[2:])


class QueryBlock(NamedTuple):
    """Which sequences, key-value heads and queries, and how many keys they see."""

    sequences: slice
    heads: slice
    queries: slice
    seen: int

    def rows(self, x_BKTGC: torch.Tensor) -> torch.Tensor:
        """Return the view [B, K, R, G, C]."""
        return x_BKTGC[self.sequences, self.heads, self.queries]

    def keys(self, x_BKSC: torch.Tensor) -> torch.Tensor:
        """Return the view [B K, S, C]."""
        return x_BKSC[self.sequences, self.heads, : self.seen].flatten(0, 1)


def attend(
    q_BHTC, k_BKSC, v_BKSC, visible=None, keep: bool = False, scale: float | None = None
) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
    """Return attention [B, H, T, C], in memory [B, T, H, C], and with `keep` the probabilities,
    which its backward takes.

    visible: what is added to the scores, [B, 1, T, S] or [T, S], 0 or -inf; without it T = S, and
    key s is visible from query s on.
    scale: of scores; None: 1 / sqrt(C).
    """
    scale = q_BHTC.shape[-1] ** -0.5 if scale is None else scale
    q_BKTGC = _grouped(q_BHTC, k_BKSC)
    k_BKSC = _multiplied(k_BKSC)
    v_BKSC = _multiplied(v_BKSC)
    out_BTHC = q_BHTC.new_empty(q_BHTC.shape[0], q_BHTC.shape[2], q_BHTC.shape[1], v_BKSC.shape[-1])
    out_BHTC = out_BTHC.transpose(1, 2)
    kept = []
    for piece in _pieces(q_BKTGC, k_BKSC, visible):
        made = _probabilities(piece, _flat(piece.rows(q_BKTGC)), q_BKTGC, k_BKSC, visible, scale)
        _write(piece.rows(_grouped(out_BHTC, k_BKSC)), torch.bmm(_multiplied(made), piece.keys(v_BKSC)))
        if keep:
            kept.append(made)
    return out_BHTC, kept if keep else None


def attend_backward(
    grad_BHTC, q_BHTC, k_BKSC, v_BKSC, visible=None, kept: Sequence | None = None, scale: float | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v, in memory as these are.

    kept: the probabilities; without them they are made again.
    scale: as in attend().
    """
    grads = tuple(map(torch.empty_like, (q_BHTC, k_BKSC, v_BKSC)))
    q_BKTGC, grad_BKTGC, k_BKSC, v_BKSC = (
        *(_grouped(x, k_BKSC) for x in (q_BHTC, grad_BHTC)),
        _multiplied(k_BKSC),
        _multiplied(v_BKSC),
    )
    of_k_BKSC, of_v_BKSC = (torch.zeros(x.shape, dtype=wide(x.dtype)) for x in (k_BKSC, v_BKSC))
    scale = q_BHTC.shape[-1] ** -0.5 if scale is None else scale
    for number, piece in enumerate(_pieces(q_BKTGC, k_BKSC, visible)):
        rows = _flat(piece.rows(q_BKTGC))
        of_rows = _flat(piece.rows(grad_BKTGC))
        keys = piece.keys(k_BKSC)
        made = _multiplied(
            _probabilities(piece, rows, q_BKTGC, k_BKSC, visible, scale) if kept is None else kept[number]
        )
        piece.keys(of_v_BKSC).add_(torch.bmm(made.mT, of_rows))
        of_scores = torch._softmax_backward_data(
            torch.bmm(of_rows, piece.keys(v_BKSC).mT), made, -1, rows.dtype
        )
        _write(piece.rows(_grouped(grads[0], k_BKSC)), torch.bmm(of_scores, keys).mul_(scale))
        piece.keys(of_k_BKSC).add_(torch.bmm(of_scores.mT, rows))
    grads[1].copy_(of_k_BKSC.mul_(scale))
    grads[2].copy_(of_v_BKSC)
    return grads


def _pieces(
    q_BKTGC: torch.Tensor, k_BKSC: torch.Tensor, visible: torch.Tensor | None
) -> Iterator[QueryBlock]:
    """Yield the pieces. Which there are is a function of shapes and types alone."""
    batch, kv_heads, length, group, _ = q_BKTGC.shape
    num_rows = _num_rows(q_BKTGC, k_BKSC)
    num_keys = k_BKSC.shape[2]
    together = max(1, SCORES // (min(num_rows, length) * group * num_keys))  # of B K
    heads = min(together, kv_heads)
    sequences = max(1, together // kv_heads)
    if visible is not None:
        sequences = 1  # each has a mask of its own
    for first in range(0, batch, sequences):
        for head in range(0, kv_heads, heads):
            for begin in range(0, length, num_rows):
                end = min(begin + num_rows, length)
                seen = end if visible is None else num_keys
                yield QueryBlock(
                    slice(first, first + sequences), slice(head, head + heads), slice(begin, end), seen
                )


def _num_rows(q_BKTGC: torch.Tensor, k_BKSC: torch.Tensor) -> int:
    """Return how many queries a piece has, at most."""
    itemsize = q_BKTGC.element_size()
    alone = q_BKTGC.shape[3] == 1
    return ROWS[itemsize] * (2 if itemsize == 2 and alone and k_BKSC.shape[2] >= LONG else 1)


def _probabilities(piece: QueryBlock, rows, q_BKTGC, k_BKSC, visible, scale: float) -> torch.Tensor:
    """Return softmax(scores) [B K, R G, S] of the rows of a piece, in the type of the queries."""
    group = q_BKTGC.shape[3]
    if visible is None:
        added = _causal(_num_rows(q_BKTGC, k_BKSC), group, k_BKSC.shape[2], rows.dtype)
        added = added[: rows.shape[1], k_BKSC.shape[2] - piece.queries.start :][:, : piece.seen]
    else:
        added = visible.expand(len(k_BKSC), 1, *visible.shape[-2:])[
            piece.sequences, 0, piece.queries
        ].repeat_interleave(group, 1)
    scores = torch.baddbmm(added.to(rows.dtype), rows, piece.keys(k_BKSC).mT, alpha=scale)
    return torch.softmax(scores, -1).to(q_BKTGC.dtype)


@lru_cache(maxsize=2)  # training has one length; `generate` has another with each token
def _causal(rows: int, group: int, num_keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what is added to scores, a constant [rows * group, num_keys + rows].

    0 for keys before these rows, then a triangle.
    """
    triangle = torch.full((rows, rows), -math.inf, dtype=dtype).triu_(1)
    return torch.cat((torch.zeros(rows, num_keys, dtype=dtype), triangle), 1).repeat_interleave(group, 0)


def _grouped(x_BHTC: torch.Tensor, k_BKSC: torch.Tensor) -> torch.Tensor:
    """Return the view [B, K, T, G, C]."""
    return x_BHTC.unflatten(1, (k_BKSC.shape[1], -1)).transpose(2, 3)


def _flat(x_BKRGC: torch.Tensor) -> torch.Tensor:
    """Return [B K, R G, C], in the type that is multiplied."""
    return x_BKRGC.to(multiplied_as(x_BKRGC.dtype)).flatten(2, 3).flatten(0, 1)


def _multiplied(x: torch.Tensor) -> torch.Tensor:
    """Return x without gaps, in the type that is multiplied."""
    return x.to(multiplied_as(x.dtype)).contiguous()


def _write(target_BKRGC: torch.Tensor, x: torch.Tensor) -> None:
    target_BKRGC.copy_(x.view(target_BKRGC.shape))

"""Attention on a CPU by oneDNN's products: of one key-value head and some queries at a time.

What it makes and takes is what attention_tiles.py does: the result and the log-sum-exp, from which
the backward makes the probabilities again. torch's own attention multiplies fp32 by MKL, and is
slow in 16 bits, most of all its backward. R queries of the G heads that share keys are the rows of
a matrix [R G, C], whose scores [R G, S] stay in the cache. Softmax and sums are fp32; factors have
the type of the queries, or fp32 where the processor multiplies that instead (kernels/processor.py).
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch

from mpitrain.kernels import attention_cpu_16bit
from mpitrain.kernels.functions import LOG2_E
from mpitrain.kernels.processor import ONEDNN, mkl_is_slow, multiplied_as, onednn_product

# of a piece, at most: queries times heads; queries
ROWS = 384
QUERIES = 128
# multiplications for the scores of a key-value head up to which the calls cost more than they gain. At 2**23,
# as 256 positions of two heads of width 64 have, they save a fifth (Zen 5, 2026-11-28)
FEW = 2**23 - 1
FEW_IN_FP16 = 2**18


class HeadBlock(NamedTuple):
    """Which queries of which heads, and how many of the keys of their key-value head they see."""

    sequence: int
    kv_head: int
    heads: slice
    queries: slice
    seen: int

    def rows(self, x_BHTX: torch.Tensor) -> torch.Tensor:
        """Return the matrix [R G, X], without gaps, in the type that is multiplied."""
        rows = x_BHTX[self.sequence, self.heads, self.queries].flatten(0, 1)
        return rows.to(multiplied_as(rows.dtype)).contiguous()

    def write(self, target_BHTX: torch.Tensor, rows: torch.Tensor) -> None:
        """Put a matrix [R G, X] where rows() takes it from."""
        target = target_BHTX[self.sequence, self.heads, self.queries]
        target.copy_(rows.view(target.shape))


def fits(q_BHTC: torch.Tensor, k_BKSC: torch.Tensor) -> bool:
    """Return whether this is faster than torch's own for these queries and keys, by processor, type
    and shape alone.
    """
    multiplications = q_BHTC.shape[1] // k_BKSC.shape[1] * q_BHTC.shape[2] * k_BKSC.shape[2] * q_BHTC.shape[3]
    slow = attention_cpu_16bit.fits(q_BHTC) or (
        q_BHTC.is_cpu and q_BHTC.dtype == torch.float32 and mkl_is_slow()
    )
    return (
        slow
        and multiplications > (FEW_IN_FP16 if q_BHTC.dtype == torch.float16 else FEW)
        and ONEDNN is not None
    )


def attend(
    q_BHTC, k_BKSC, v_BKSC, causal: bool, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H, T, C], in memory [B, T, H, C], and the log-sum-exp [B, H, T] in fp32.

    causal: T = S and key s is visible from query s on; else every key is.
    scale: of scores; None: 1 / sqrt(C).
    """
    scale = q_BHTC.shape[-1] ** -0.5 if scale is None else scale
    batch, heads, length, _ = q_BHTC.shape
    out_BHTC = q_BHTC.new_empty(batch, length, heads, v_BKSC.shape[-1]).transpose(1, 2)
    lse_BHT = q_BHTC.new_empty(batch, heads, length, dtype=torch.float32)
    for pieces, k_SC, v_SC in _by_head(q_BHTC, k_BKSC, v_BKSC, causal):
        for piece in pieces:
            scores = _scores(piece, piece.rows(q_BHTC), k_SC, causal, scale)
            most = scores.amax(-1, keepdim=True)
            weights = scores.sub_(most).exp2_()
            total = weights.sum(-1, keepdim=True)
            out = onednn_product(weights.to(v_SC.dtype), v_SC[: piece.seen].t())
            piece.write(out_BHTC, out.to(torch.float32).div_(total))
            piece.write(lse_BHT, total.log2_().add_(most).div_(LOG2_E))
    return out_BHTC, lse_BHT


def attend_backward(
    grad_BHTC, q_BHTC, k_BKSC, v_BKSC, out_BHTC, lse_BHT, causal: bool, scale: float | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of q, k and v, in memory as these are.

    `out` and `lse` are those over all keys, of other tiles too.
    """
    grads = tuple(map(torch.empty_like, (q_BHTC, k_BKSC, v_BKSC)))
    scale = q_BHTC.shape[-1] ** -0.5 if scale is None else scale
    along_BHT = (grad_BHTC.to(torch.float32) * out_BHTC).sum(-1)
    for pieces, k_SC, v_SC in _by_head(q_BHTC, k_BKSC, v_BKSC, causal):
        of_k_SC, of_v_SC = (torch.zeros_like(x, dtype=torch.float32) for x in (k_SC, v_SC))
        for piece in pieces:
            rows = piece.rows(q_BHTC)
            of_rows = piece.rows(grad_BHTC)
            seen = slice(piece.seen)
            weights = (
                _scores(piece, rows, k_SC, causal, scale)
                .sub_(piece.rows(lse_BHT)[:, None], alpha=LOG2_E)
                .exp2_()
            )
            of_scores = (
                onednn_product(of_rows, v_SC[seen])
                .to(torch.float32)
                .sub_(piece.rows(along_BHT)[:, None])
                .mul_(weights)
            )
            weights = weights.to(rows.dtype)
            of_scores = of_scores.to(rows.dtype)
            of_v_SC[seen] += onednn_product(weights.t(), of_rows.t())
            of_k_SC[seen] += onednn_product(of_scores.t(), rows.t())
            piece.write(grads[0], onednn_product(of_scores, k_SC[seen].t()).mul_(scale))
        grads[1][piece.sequence, piece.kv_head] = of_k_SC.mul_(scale)
        grads[2][piece.sequence, piece.kv_head] = of_v_SC
    return grads


def _by_head(
    q_BHTC, k_BKSC, v_BKSC, causal: bool
) -> Iterator[tuple[list[HeadBlock], torch.Tensor, torch.Tensor]]:
    """Yield the pieces of each key-value head of each sequence, with its keys and values [S, C] as
    rows() gives queries.
    """
    (batch, heads, length, _), (kv_heads, num_keys) = q_BHTC.shape, k_BKSC.shape[1:3]
    group = heads // kv_heads
    kind = multiplied_as(q_BHTC.dtype)
    starts = range(0, length, max(1, min(ROWS // group, QUERIES)))
    for sequence in range(batch):
        for head in range(kv_heads):
            sharing = slice(head * group, (head + 1) * group)
            ends = [min(begin + starts.step, length) for begin in starts]
            pieces = [
                HeadBlock(sequence, head, sharing, slice(begin, end), end if causal else num_keys)
                for begin, end in zip(starts, ends)
            ]
            yield pieces, *(x_BKSC[sequence, head].to(kind).contiguous() for x_BKSC in (k_BKSC, v_BKSC))


def _scores(
    piece: HeadBlock, rows: torch.Tensor, k_SC: torch.Tensor, causal: bool, scale: float
) -> torch.Tensor:
    """Return the scores [R G, S] times LOG2_E in fp32, -inf where a query doesn't see a key."""
    scores = onednn_product(rows, k_SC[: piece.seen]).to(torch.float32).mul_(scale * LOG2_E)
    if causal:
        num_queries = piece.queries.stop - piece.queries.start
        own = scores.view(-1, num_queries, piece.seen)[..., piece.queries]
        own += _hidden(num_queries)
    return scores


@lru_cache(maxsize=4)
def _hidden(num_queries: int) -> torch.Tensor:
    """Return what is added to the scores of queries for their own positions, a constant.

    -inf above the diagonal.
    """
    return torch.full((num_queries, num_queries), -math.inf).triu_(1)

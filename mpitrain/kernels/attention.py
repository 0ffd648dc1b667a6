"""What a layer asks of attention, and which kernel computes it.

    what is made            where                                    kernel
    the result              CPU, 16 bits that it multiplies slowly,  CPU_16BIT: attention_cpu_16bit.py
                            or bf16
                            CPU, large fp32 where MKL is slow        CPU_ONEDNN: attention_cpu_fp32.py
                            else                                     TORCH: attention_torch.py
    the result and the      scores are soft-capped or dropped out    PRODUCTS_OF_SOME_ROWS:
    log-sum-exp, of a tile                                           attention_products.py
    (attention_tiles.py)    CPU, as above, without a mask            CPU_ONEDNN: attention_cpu_fp32.py
                            CPU                                      CPU_FLASH: torch's
                            GPU, 16 bits, without a mask             CUDA_FLASH: torch's
                            else                                     PRODUCTS: attention_products.py

A token that is generated has one query: attention_one_query.py. Documents that share a row are
computed span by span on a CPU, each as a tile or in 16 bits: attention_documents.py.

Tiles are made where the sequence is spread over ranks (context parallelism), in a sliding window,
with sinks and with soft caps. Which kernel it is depends on processor, type and shape alone: same
bits.
"""

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch

from mpitrain.kernels import attention_cpu_16bit, attention_cpu_fp32
from mpitrain.kernels.document_spans import Spans
from mpitrain.kernels.dropout import DropoutDraw, ProbabilityDropout


@dataclass(frozen=True)
class AttentionRequest:
    """What is asked of attention, beside queries, keys and values. It is causal.

    scale: what scores are multiplied by; None: 1 / sqrt(width of a head).
    window: positions that a query sees, its own included; 0: all before it (attention_window.py).
    soft_cap: c: scores become c tanh(score / c); 0: none (attention_products.py).
    sinks: [H], for each head the score of one more key, whose value is 0 (attention_window.py).
    mask: 0 or -inf, added to the scores instead of causality, [B, 1, T, S] or [T, S].
    documents: the number of each position's document in the whole sequence, [B, T] or [T],
    integers. A query sees its own document only. Read where the sequence is spread over ranks; else
    spans or a mask say it.
    order: the position of each in its row, [B, T]; None: they are in order.
    spans: the documents of each sequence, in place of a mask, on a CPU (attention_documents.py).
    dropout: of probabilities (dropout.py); None: none.
    """

    scale: float | None = None
    window: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    order: torch.Tensor | None = None
    spans: Spans | None = None
    dropout: ProbabilityDropout | None = None

    @property
    def by_tiles(self) -> bool:
        """Whether only what makes a log-sum-exp can compute it."""
        return bool(self.window or self.soft_cap) or not (self.sinks is self.dropout is None)

    def scale_of(self, width: int) -> float:
        """Return what scores are multiplied by for heads of a width."""
        return width**-0.5 if self.scale is None else self.scale

    def given(
        self,
        *,
        sinks: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        documents: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        spans: Spans | None = None,
    ) -> "AttentionRequest":
        """Return the same with these tensors and no others. Without any, it may be kept for the backward."""
        own = self.sinks, self.mask, self.documents, self.spans
        if all(x is None for x in (sinks, mask, documents, spans, *own)):
            return self
        return replace(self, sinks=sinks, mask=mask, documents=documents, order=order, spans=spans)

    def drawn(self, draw: DropoutDraw | None) -> "AttentionRequest":
        """Return what is asked of a microbatch: with its dropout; with None, without any."""
        if self.dropout is None:
            return self
        return replace(self, dropout=None if draw is None else replace(self.dropout, draw=draw))

    def between(self, queries: np.ndarray, keys: np.ndarray) -> "AttentionRequest":
        """Return what is asked between some positions."""
        if self.dropout is None:
            return self
        return replace(self, dropout=self.dropout.between(queries, keys))

    def of_sequence(self, number: int) -> "AttentionRequest":
        """Return what is asked of one of the sequences of a microbatch."""
        if self.dropout is None or self.dropout.draw is None:
            return self
        draw = self.dropout.draw._replace(sequences=self.dropout.draw.sequences[number : number + 1])
        return replace(self, dropout=replace(self.dropout, draw=draw))

    def block(
        self, queries: slice, keys: slice, num_queries: int = 0, num_keys: int = 0
    ) -> "AttentionRequest":
        """Return what is asked of some of the queries and keys.

        num_queries, num_keys: of all, if nothing says their positions: queries are the last of the keys.
        """
        if self.dropout is None:
            return self
        at_queries, at_keys = self.dropout.queries, self.dropout.keys
        if at_queries is None or at_keys is None:
            at_keys = np.arange(num_keys)
            at_queries = at_keys[num_keys - num_queries :]
        return self.between(at_queries[queries], at_keys[keys])


PLAIN = AttentionRequest()


class Kernel(Enum):
    """A kernel of attention, in the words in which a run says which it took."""

    CPU_16BIT = "products of 16-bit matrices"
    CPU_ONEDNN = "oneDNN's products"
    TORCH = "torch's scaled_dot_product_attention"
    CPU_FLASH = "torch's flash attention for CPUs"
    CUDA_FLASH = "torch's flash attention for CUDA"
    PRODUCTS = "matrix products"
    PRODUCTS_OF_SOME_ROWS = "matrix products of some queries at a time, for soft caps and dropout"


def choose(
    request: AttentionRequest, q_BHTC: torch.Tensor, k_BKSC: torch.Tensor, masked: bool, tile: bool = False
) -> Kernel:
    """Return the kernel for these queries and keys.

    masked: more than causality decides which keys a query sees.
    tile: the log-sum-exp is wanted, too.
    """
    onednn = not masked and attention_cpu_fp32.fits(q_BHTC, k_BKSC)
    if not tile and not request.by_tiles:
        if attention_cpu_16bit.fits(q_BHTC):
            return Kernel.CPU_16BIT
        return Kernel.CPU_ONEDNN if onednn else Kernel.TORCH
    if request.soft_cap or request.dropout is not None:
        return Kernel.PRODUCTS_OF_SOME_ROWS
    if onednn:
        return Kernel.CPU_ONEDNN
    if q_BHTC.is_cpu:
        return Kernel.CPU_FLASH
    return Kernel.CUDA_FLASH if not masked and _has_cuda_flash(q_BHTC) else Kernel.PRODUCTS


def _has_cuda_flash(q: torch.Tensor) -> bool:
    fits = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return fits and q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0)

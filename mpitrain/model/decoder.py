"""The blocks of a Llama-style decoder as lists: local segments, and between them what is sent over the tensor-parallel axis.

    one rank      x + [ norm, attention ]                                          and the same with the feed-forward
    tp            x + [ norm | copy   | attention of some heads | sum     ]        x is whole on every rank
    tp, sequence  x + [ norm | gather | attention of some heads | scatter ]        x is divided along the sequence
    async         x + [ norm | gather, projection | core | output, scatter ]       the same by chunks (parallel/tensor_overlap.py)

With context parallelism attention itself is a segment, an exchange of keys and values, and a segment (parallel/context/attention.py).

The lists are the recipe: what a layout sends in forward and, by the adjoints, in backward. Megatron-LM (arXiv:1909.08053) and its
sequence parallelism (arXiv:2205.05198, section 4.2).
"""

from mpitrain.comm.mesh import Axis
from mpitrain.model.segments import Attention, Core, Embedding, FeedForward, Head, Norm, Output, Projection, Rotary, SpreadAttention
from mpitrain.model.vocabulary import VocabularyEmbedding, VocabularyHead
from mpitrain.parallel.communication import Communication
from mpitrain.parallel.context.attention import ContextAttention
from mpitrain.parallel.tensor_overlap import Chunked
from mpitrain.parallel.walk import Item, Residual
from mpitrain.parallel.zero.parameters import Parameter

SEQUENCE = 1  # dim of activations [B, T, D]


def decoder_block(
    parameters: list[Parameter],
    rotary: Rotary,
    tp: Axis | None,
    sequence: bool,
    core: ContextAttention | None,
    asynchronous: bool = False,
    narrow: bool = False,
) -> list[Item]:
    """Return one block, or half of one: attention and feed-forward, each around the residual stream.

    core: the attention proper where the sequence is spread over ranks.  asynchronous: what tp sends goes by chunks; needs `sequence`.
    narrow: linears multiply in fp8.
    """
    named = {p.name.split(".", 2)[2].removesuffix(".weight"): p for p in parameters}
    by_chunks = tp is not None and asynchronous
    items: list[Item] = []
    if "attention.q" in named:
        norm, *weights, output = (named[f"attention.{name}"] for name in ("norm", "q", "k", "v", "output"))
        projection, back = Projection(None if tp else norm, *weights, rotary, narrow), Output(output, narrow)
        if by_chunks:
            items.append(Residual([Norm(norm), *_attention_by_chunks(projection, core, back, tp)]))
        else:
            inner = SpreadAttention(projection, core, back) if core else Attention(projection, back)
            items.append(Residual(_around(inner, norm, tp, sequence)))
    if "ffn.gate" in named:
        norm, *weights = (named[f"ffn.{name}"] for name in ("norm", "gate", "up", "down"))
        inner = FeedForward(None if tp else norm, *weights, narrow)
        if by_chunks:
            items.append(Residual([Norm(norm), Chunked(inner, tp, gather=True, scatter=True)]))
        else:
            items.append(Residual(_around(inner, norm, tp, sequence)))
    return items


def embedding(weight: Parameter, tp: Axis | None, sequence: bool) -> list[Item]:
    """Return the lookup of tokens."""
    return [VocabularyEmbedding(weight), _out(tp, sequence)] if tp else [Embedding(weight)]


def head(norm: Parameter, weight: Parameter, tp: Axis | None, sequence: bool) -> list[Item]:
    """Return the last norm, the logits and the loss."""
    return [Norm(norm), _into(tp, sequence), VocabularyHead(weight, tp)] if tp else [Head(norm, weight)]


def _attention_by_chunks(projection: Projection, core: ContextAttention | None, output: Output, tp: Axis) -> list[Item]:
    before, behind = Chunked(projection, tp, gather=True), Chunked(output, tp, scatter=True)
    return [SpreadAttention(before, core, behind)] if core else [before, Core(), behind]


def _around(inner: Item, norm: Parameter, tp: Axis | None, sequence: bool) -> list[Item]:
    return [Norm(norm), _into(tp, sequence), inner, _out(tp, sequence)] if tp else [inner]


def _into(tp: Axis, sequence: bool) -> Communication:
    return Communication("gather", tp, SEQUENCE) if sequence else Communication("copy", tp)


def _out(tp: Axis, sequence: bool) -> Communication:
    return Communication("scatter", tp, SEQUENCE) if sequence else Communication("sum", tp)

"""A decoder as most families have it: attention and a gated feed-forward in each block, by the keys of a
resolved configuration.

A key that a family doesn't have is None there, and does nothing.
"""

from collections.abc import Iterable
from typing import Any

from mpitrain.kernels.activation_functions import SILU, Activation
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.feed_forward import FeedForward
from mpitrain.model.layers.post_norm import PostNorm
from mpitrain.model.layers.rope import Rope, rope_of
from mpitrain.plan.declared.layer import Layer, ModelLayers
from mpitrain.plan.declared.parameters import NormKind
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.settings.attention import head_width


def decoder(
    config: ResolvedConfig,
    *,
    kind: NormKind = NormKind.RMS,
    norm_after: NormKind = NormKind.NONE,
    activation: Activation = SILU,
    scale: float = 1.0,
    **more: Any,
) -> ModelLayers:
    """Return the layers of a model with dense blocks.

    kind: of norms before sublayers, of heads, and before the logits.
    norm_after: of norms after sublayers; then of that before the logits, too.
    activation: of feed-forwards.  scale: of embeddings.  more: fields of Attention.
    """
    model = config.model
    depth = 2 * model.layers
    ffn = FeedForward(model.width, model.ffn, depth, model.eps, activation, kind, bool(model.ffn_biased))
    blocks: list[tuple[Layer, ...]] = [(own, ffn) for own in attentions(config, kind=kind, **more)]
    if norm_after is not NormKind.NONE:
        kind = norm_after
        norm = model.width, model.eps, norm_after
        blocks = [(PostNorm(own, "attention", *norm), PostNorm(ffn, "ffn", *norm)) for own, _ in blocks]
    return with_ends(config, blocks, kind=kind, scale=scale)


def with_ends(
    config: ResolvedConfig,
    blocks: Iterable[tuple[Layer, ...]],
    *,
    kind: NormKind = NormKind.RMS,
    scale: float = 1.0,
) -> ModelLayers:
    """Return a model of these blocks. kind: of the norm before the logits.  scale: of embeddings."""
    model = config.model
    last = Head(model.vocab, model.width, model.tied, model.eps, kind, model.logit_cap or 0.0)
    of_first = scale, model.positions or 0, model.embedding_dropout or 0.0
    first = Embedding(model.vocab, model.width, model.tied, *of_first)
    return ModelLayers(first, tuple(blocks), last)


def attentions(config: ResolvedConfig, **more: Any) -> list[Attention]:
    """Return each block's Attention, by its letters in window_blocks and rotary_blocks.

    more: fields of Attention.
    """

    model, own = config.model, config.attention
    fields = dict(
        eps=model.eps,
        normed=bool(own.normed),
        biased=own.biases in ("qkv", "all"),
        biased_output=own.biases == "all",
        head_width=head_width(config),
        soft_cap=own.score_cap or 0.0,
        scale=own.score_width**-0.5 if own.score_width else None,
    )
    layers = []
    for number in range(model.layers):
        window = own.window if own.window and _letter(own.window_blocks, number) != "f" else 0
        rope = None if _letter(own.rotary_blocks, number) == "n" else _rope(config, bool(window))
        of_block = {**fields, "window": window, **more}
        layers.append(Attention(model.width, model.heads, model.kv_heads, rope, 2 * model.layers, **of_block))
    return layers


def _letter(blocks: str | None, number: int) -> str:
    """Return the letter of a block, "" where there are none."""
    return blocks[number % len(blocks)] if blocks else ""


def _rope(config: ResolvedConfig, windowed: bool) -> Rope | None:
    """Return the rotary positions of a block, or None; with a window, of a theta of their own."""
    own = config.attention
    if own.theta is None:
        return None
    width = own.rotary_width or head_width(config)
    return Rope(width, own.window_theta) if windowed and own.window_theta else rope_of(own, width)

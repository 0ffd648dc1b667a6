"""A model with experts: which blocks have experts, and which a plain feed-forward."""

from collections.abc import Sequence
from typing import Any

from mpitrain.kernels.activation_functions import SILU, Activation
from mpitrain.model.families.decoder import attentions, with_ends
from mpitrain.model.layers.experts import Experts
from mpitrain.model.layers.feed_forward import FeedForward
from mpitrain.plan.declared.layer import Layer, ModelLayers
from mpitrain.plan.declared.resolved import ResolvedConfig


def sparse_model(config: ResolvedConfig, **more: Any) -> ModelLayers:
    """Return the layers of a model. more: fields of Attention."""
    return with_ends(config, sparse_blocks(config, attentions(config, **more)))


def sparse_blocks(
    config: ResolvedConfig, attention: Sequence[Layer], *, biased: bool = False, activation: Activation = SILU
) -> tuple[tuple[Layer, Layer], ...]:
    """Return blocks of one of the layers of attention each, in turns, and experts or a feed-forward.

    The first experts.first blocks have none; of those that follow, each experts.every-th has some.
    biased, activation: of experts.
    """
    model, experts = config.model, config.experts
    depth = 2 * model.layers
    sparse = Experts(model.width, experts, depth, model.eps, biased, activation)
    dense = FeedForward(model.width, model.ffn, depth, model.eps)
    return tuple(
        (attention[number % len(attention)], sparse if is_sparse else dense)
        for number, is_sparse in enumerate(has_experts(model.layers, experts.first, experts.every))
    )


def has_experts(layers: int, first: int, every: int) -> list[bool]:
    """Return which blocks have experts."""
    return [number >= first and (number - first + 1) % every == 0 for number in range(layers)]

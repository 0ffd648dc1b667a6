"""The blocks of a model with experts: which of them have experts, and which a plain feed-forward."""

from collections.abc import Sequence

from mpitrain.config import Config
from mpitrain.kernels.gates import SILU, Gate
from mpitrain.model.layers.experts import Experts
from mpitrain.model.layers.feed_forward import FeedForward
from mpitrain.plan.declared.layer import Layer
from mpitrain.plan.declared.parameters import EPS


def sparse_blocks(
    config: Config,
    attention: Sequence[Layer],
    eps: float = EPS,
    *,
    biased: bool = False,
    gate: Gate = SILU,
) -> tuple[tuple[Layer, Layer], ...]:
    """Return blocks of one of the layers of attention each, in turns, and experts or a feed-forward.

    The first experts.first blocks have none; of those that follow, each experts.every-th has some.
    biased, gate: of experts.
    """
    model = config.model
    experts = config.experts
    depth = 2 * config.model.layers
    sparse = Experts(model.width, experts, depth, eps, biased, gate)
    dense = FeedForward(model.width, model.ffn, depth, eps)
    has_experts = [
        number >= experts.first and (number - experts.first + 1) % experts.every == 0
        for number in range(model.layers)
    ]
    return tuple(
        (attention[number % len(attention)], sparse if each else dense)
        for number, each in enumerate(has_experts)
    )

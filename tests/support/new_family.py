"""A family in a file of its own: model.family = "new_family:CAPPED", with this folder on PYTHONPATH.

What no other family has: squared ReLU as activation (arXiv:2109.08668), a norm after each sublayer,
and soft-capped attention scores (both Gemma 2's, arXiv:2408.00118), in a window in every other block.
"""

from dataclasses import dataclass

from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.feed_forward import FeedForward
from mpitrain.model.layers.post_norm import PostNorm
from mpitrain.model.layers.rope import rope_of
from mpitrain.plan.declared.family import ROTARY, ModelFamily
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.settings.attention import head_width

EPS = 1e-6
SOFT_CAP = 0.05  # scores of small random models are small: such that it is met


@dataclass(frozen=True)
class SquaredRelu:
    """relu(gate) ** 2 * up."""

    def activation(self, gate):
        return gate.relu().square_()

    def scale(self, up):
        return up

    def grad_of_gate(self, grad, gate):
        return (2 * gate.relu()).mul_(grad)

    def grad_of_up(self, grad, up):
        return grad


def layers(config):
    """Return the layers of a resolved configuration's model."""
    model = config.model
    width = model.width
    depth = 2 * model.layers
    rope = rope_of(config.attention, head_width(config))
    make = lambda window: Attention(  # noqa: E731
        width, model.heads, model.kv_heads, rope, depth, EPS, window=window, soft_cap=SOFT_CAP
    )
    attention = [PostNorm(make(window), "attention", width, EPS) for window in (config.attention.window, 0)]
    ffn = PostNorm(FeedForward(width, model.ffn, depth, EPS, SquaredRelu()), "ffn", width, EPS)
    blocks = tuple((attention[number % 2], ffn) for number in range(model.layers))
    return ModelLayers(
        Embedding(model.vocab, width, model.tied), blocks, Head(model.vocab, width, model.tied, EPS)
    )


CAPPED = ModelFamily(
    "capped",
    layers,
    attention=dict(ROTARY, window=0),
    presets={"capped-tiny": dict(layers=4, width=16, heads=4, kv_heads=2, ffn=24, tied=True)},
)

"""Qwen3 (arXiv:2505.09388, section 2).

Llama with heads as wide as one likes, whose queries and keys are normed; dense, or with experts.
"""

from mpitrain.config import Config
from mpitrain.model.families.names import DENSE, HUGGING_FACE, NORMS_OF_HEADS, ROUTED
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.feed_forward import FeedForward
from mpitrain.model.layers.rope import rope_of
from mpitrain.plan.declared.family import ALL_ALIKE, OF_SOFTMAX, ROTARY, ModelFamily
from mpitrain.plan.declared.layer import Layer, ModelLayers
from mpitrain.plan.declared.published import PUBLISHED
from mpitrain.plan.settings.attention import head_width

EPS = 1e-6


def _qwen3(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    model = config.model
    block = _attention(config), FeedForward(model.width, model.ffn, 2 * model.layers, EPS)
    return _family(config, model.layers * (block,))


def _qwen3_moe(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    return _family(config, sparse_blocks(config, [_attention(config)], EPS))


def _attention(config: Config) -> Attention:
    model = config.model
    rope = rope_of(config.attention, head_width(config))
    return Attention(model.width, model.heads, model.kv_heads, rope, 2 * model.layers, EPS, normed=True)


def _family(config: Config, blocks: tuple[tuple[Layer, ...], ...]) -> ModelLayers:
    vocab = config.model.vocab
    width = config.model.width
    tied = config.model.tied
    return ModelLayers(Embedding(vocab, width, tied), blocks, Head(vocab, width, tied, EPS))


_KEYS = dict(ROTARY, theta=1_000_000.0)

QWEN3 = ModelFamily(
    name="qwen3",
    layers=_qwen3,
    attention=_KEYS,
    weight_names={HUGGING_FACE: DENSE | NORMS_OF_HEADS},
)
QWEN3_MOE = ModelFamily(
    name="qwen3-moe",
    layers=_qwen3_moe,
    attention=_KEYS,
    experts=dict(ALL_ALIKE, **OF_SOFTMAX, count=128, active=8, balance="global"),
    # blocks that experts.every leaves without experts have a feed-forward
    weight_names={HUGGING_FACE: DENSE | NORMS_OF_HEADS | ROUTED},
    presets={
        name: dict(
            PUBLISHED[name].preset(),
            attention=dict(head_width=128),
            experts=dict(width=PUBLISHED[name].experts.width),
        )
        for name in ("qwen3-30b-a3b", "qwen3-235b-a22b")
    },
)

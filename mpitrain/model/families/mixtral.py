"""Mixtral (arXiv:2401.04088): Llama's attention, and experts instead of its feed-forward."""

from mpitrain.config import Config
from mpitrain.model.families.names import ATTENTION, ENDS, HUGGING_FACE, NORMS, in_block
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.rope import rope_of
from mpitrain.plan.declared.family import ALL_ALIKE, OF_SOFTMAX, ROTARY, ModelFamily
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.declared.published import PUBLISHED
from mpitrain.plan.settings.attention import head_width


def _mixtral(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    model = config.model
    rope = rope_of(config.attention, head_width(config))
    attention = Attention(model.width, model.heads, model.kv_heads, rope, 2 * model.layers)
    first, last = (end(model.vocab, model.width, model.tied) for end in (Embedding, Head))
    return ModelLayers(first, sparse_blocks(config, [attention]), last)


_ROUTED = in_block(
    {
        "ffn.router.weight": "block_sparse_moe.gate.weight",
        "ffn.experts.gate.weight": "block_sparse_moe.experts.{expert}.w1.weight",
        "ffn.experts.up.weight": "block_sparse_moe.experts.{expert}.w3.weight",
        "ffn.experts.down.weight": "block_sparse_moe.experts.{expert}.w2.weight",
    }
)

MIXTRAL = ModelFamily(
    name="mixtral",
    layers=_mixtral,
    attention=ROTARY,
    experts=dict(ALL_ALIKE, **OF_SOFTMAX, count=8, active=2, balance="microbatch"),
    weight_names={HUGGING_FACE: ENDS | NORMS | ATTENTION | _ROUTED},
    presets={
        name: dict(PUBLISHED[name].preset(), attention=dict(theta=1e6))
        for name in ("mixtral-8x7b", "mixtral-8x22b")
    },
)

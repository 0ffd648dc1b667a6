"""DeepSeek-V3 (arXiv:2412.19437, section 2.1).

Latent attention; experts, some of which all tokens meet, behind a few dense blocks.
"""

from mpitrain.config import Config
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.latent_attention import LatentAttention, latent_heads
from mpitrain.model.layers.rope import rope_of
from mpitrain.plan.declared.family import ALL_ALIKE, ROTARY, ModelFamily
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.declared.published import PUBLISHED
from mpitrain.plan.settings.attention import head_width

EPS = 1e-6


def _deepseek_v3(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    model = config.model
    own = config.attention
    sizes = head_width(config), own.value_width, own.q_rank, own.kv_rank
    attention = LatentAttention(
        model.width, model.heads, *sizes, rope_of(own, own.rotary_width), 2 * model.layers, EPS
    )
    first = Embedding(model.vocab, model.width, model.tied)
    last = Head(model.vocab, model.width, model.tied, EPS)
    return ModelLayers(first, sparse_blocks(config, [attention], EPS), last)


DEEPSEEK_V3 = ModelFamily(
    name="deepseek-v3",
    layers=_deepseek_v3,
    # None: by the width of a head
    attention=dict(ROTARY, q_rank=None, kv_rank=None, rotary_width=None, value_width=None),
    experts=dict(
        ALL_ALIKE,
        count=256,
        active=8,
        shared=1,
        groups=8,
        groups_active=4,
        first=3,
        score="sigmoid",
        normalised=True,
        scale=2.5,
        balance="bias",
        balance_weight=1e-4,
    ),
    heads=latent_heads,
    grouped=False,
    presets={
        "deepseek-v3": dict(
            {key: size for key, size in PUBLISHED["deepseek-v3"].preset().items() if key != "kv_heads"},
            attention=dict(
                head_width=128,
                q_rank=1536,
                kv_rank=512,
                rotary_width=64,
                value_width=128,
                yarn_factor=40.0,
                yarn_length=4096,
            ),
            experts=dict(width=2048),
        ),
    },
)

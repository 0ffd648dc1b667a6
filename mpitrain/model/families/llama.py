"""Llama (arXiv:2302.13971, 2307.09288).

Attention and a gated feed-forward, each behind a norm, around the residual stream.
"""

from mpitrain.config import Config
from mpitrain.model.families.names import DENSE, HUGGING_FACE
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.feed_forward import FeedForward
from mpitrain.model.layers.rope import rope_of
from mpitrain.plan.declared.family import ROTARY, ModelFamily
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.declared.published import PUBLISHED
from mpitrain.plan.settings.attention import head_width


def _llama(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    model = config.model
    depth = 2 * model.layers
    attention = Attention(
        model.width, model.heads, model.kv_heads, rope_of(config.attention, head_width(config)), depth
    )
    block = attention, FeedForward(model.width, model.ffn, depth)
    first, last = (end(model.vocab, model.width, model.tied) for end in (Embedding, Head))
    return ModelLayers(first, model.layers * (block,), last)


LLAMA = ModelFamily(
    name="llama",
    layers=_llama,
    attention=ROTARY,
    weight_names={HUGGING_FACE: DENSE},
    presets={
        "quickstart": dict(layers=6, width=128, heads=4, kv_heads=2, ffn=384, tied=True),
        "reference": dict(layers=8, width=384, heads=6, kv_heads=2, ffn=1024, vocab=4096, tied=False),
        "smollm2-135m": dict(
            layers=30,
            width=576,
            heads=9,
            kv_heads=3,
            ffn=1536,
            vocab=49152,
            tied=True,
            attention=dict(theta=100_000.0),
        ),
        "llama3.2-1b": dict(
            PUBLISHED["llama3.2-1b"].preset(),
            attention=dict(theta=500_000.0, llama3_factor=32.0, llama3_length=8192),
        ),
        **{
            name: dict(PUBLISHED[name].preset(), attention=dict(theta=500_000.0))
            for name in ("llama3-8b", "llama3-70b")
        },
        "llama3-405b": dict(
            PUBLISHED["llama3-405b"].preset(),
            attention=dict(theta=500_000.0, llama3_factor=8.0, llama3_length=8192),
        ),
    },
)

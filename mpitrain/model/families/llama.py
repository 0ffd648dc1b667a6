"""Llama (arXiv:2302.13971, 2307.09288), and Mistral without its window.

Attention and a gated feed-forward, each behind a norm, around the residual stream.
"""

from typing import Any

from mpitrain.config import Config
from mpitrain.model.families.fields import (
    read_head_width,
    read_rope,
    read_silu,
    read_sizes,
    write_head_width,
    write_rope,
    write_sizes,
)
from mpitrain.model.families.names import DENSE, HUGGING_FACE
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.feed_forward import FeedForward
from mpitrain.model.layers.rope import rope_of
from mpitrain.plan.declared.family import ROTARY, ModelFamily
from mpitrain.plan.declared.hugging_face import Fields, ModelType
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.declared.parameters import EPS
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


def _read_llama(fields: Fields) -> None:
    _read_common(fields)
    fields.only("rms_norm_eps", EPS, default=1e-6)
    fields.only("attention_bias", False)
    fields.only("mlp_bias", False)


def _read_mistral(fields: Fields) -> None:
    _read_common(fields, kv_heads=8)
    fields.only("rms_norm_eps", EPS, default=1e-6)
    if (window := fields.take("sliding_window", 4096, null=0)) != 0:
        fields.refuse("sliding_window", "no model of this family has a window; needed null", window)


def _read_common(fields: Fields, kv_heads: int | None = None) -> None:
    read_sizes(fields, kv_heads=kv_heads)
    read_head_width(fields)
    read_silu(fields)
    read_rope(fields, 10_000.0)


def _write_llama(config: Config) -> dict[str, Any]:
    return dict(
        write_sizes(config),
        **write_head_width(config),
        **write_rope(config),
        hidden_act="silu",
        rms_norm_eps=EPS,
        attention_bias=False,
        mlp_bias=False,
    )


LLAMA = ModelFamily(
    name="llama",
    layers=_llama,
    attention=ROTARY,
    weight_names={HUGGING_FACE: DENSE},
    model_types=(
        ModelType("llama", "LlamaForCausalLM", _read_llama, _write_llama),
        ModelType("mistral", "MistralForCausalLM", _read_mistral, lambda config: None),
    ),
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
            layers=16,
            width=2048,
            heads=32,
            kv_heads=8,
            ffn=8192,
            vocab=128256,
            tied=True,
            attention=dict(theta=500_000.0, llama3_factor=32.0, llama3_length=8192),
        ),
        "llama3-8b": dict(
            layers=32,
            width=4096,
            heads=32,
            kv_heads=8,
            ffn=14336,
            vocab=128256,
            tied=False,
            attention=dict(theta=500_000.0),
        ),
    },
)

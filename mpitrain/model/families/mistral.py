"""Mistral 7B (arXiv:2310.06825): Llama, whose attention sees a window in every block."""

from typing import Any

from mpitrain.config import Config
from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.fields import (
    read_eps,
    read_head_width,
    read_rope,
    read_silu,
    read_sizes,
    write_head_width,
    write_rope,
    write_sizes,
)
from mpitrain.model.families.names import DENSE, HUGGING_FACE
from mpitrain.plan.declared.family import ROTARY, ModelFamily
from mpitrain.plan.declared.hugging_face import Fields, ModelType


def _read(fields: Fields) -> None:
    read_sizes(fields, kv_heads=8)
    read_head_width(fields)
    read_silu(fields)
    read_rope(fields, 10_000.0)
    read_eps(fields, 1e-6)
    fields.integer("sliding_window", 4096, to="attention.window", least=0, null=0)


def _write(config: Config) -> dict[str, Any]:
    return dict(
        write_sizes(config),
        **write_head_width(config),
        **write_rope(config),
        hidden_act="silu",
        rms_norm_eps=config.model.eps,
        sliding_window=config.attention.window or None,
    )


_PUBLISHED = dict(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, tied=False)

MISTRAL = ModelFamily(
    name="mistral",
    layers=decoder,
    attention=dict(ROTARY, window=4096),
    model=dict(eps=1e-5),
    weight_names={HUGGING_FACE: DENSE},
    model_types=(ModelType("mistral", "MistralForCausalLM", _read, _write),),
    presets={
        "phi3-mini": dict(  # config.json of microsoft/Phi-3-mini-4k-instruct; arXiv:2404.14219
            layers=32,
            width=3072,
            heads=32,
            kv_heads=32,
            ffn=8192,
            vocab=32064,
            tied=False,
            attention=dict(window=2047),
        ),
        "mistral-7b": dict(_PUBLISHED, vocab=32000),
        # without a window, and theta 1e6
        "mistral-7b-v0.3": dict(_PUBLISHED, vocab=32768, attention=dict(theta=1e6, window=0)),
    },
)

"""Mixtral (arXiv:2401.04088): Llama's attention, and experts instead of its feed-forward."""

from typing import Any

from mpitrain.config import Config
from mpitrain.model.families.decoder import attentions, with_ends
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
from mpitrain.model.families.names import ATTENTION, ENDS, HUGGING_FACE, NORMS, in_block
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.plan.declared.family import ALL_ALIKE, OF_SOFTMAX, ROTARY, ModelFamily
from mpitrain.plan.declared.hugging_face import Fields, ModelType
from mpitrain.plan.declared.layer import ModelLayers


def _mixtral(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    return with_ends(config, sparse_blocks(config, attentions(config)))


def _read_mixtral(fields: Fields) -> None:
    read_sizes(fields, kv_heads=8)
    read_head_width(fields)
    read_silu(fields)
    read_rope(fields, 1_000_000.0)
    read_eps(fields, 1e-5)
    fields.integer("sliding_window", 0, to="attention.window", least=0, null=0)
    fields.integer("num_local_experts", 8, to="experts.count")
    fields.integer("num_experts_per_tok", 2, to="experts.active")
    fields.give("experts.width", fields.keys["model.ffn"], "intermediate_size")


def _write_mixtral(config: Config) -> dict[str, Any]:
    experts = config.experts
    return dict(
        write_sizes(config) | dict(intermediate_size=experts.width),
        **write_head_width(config),
        **write_rope(config),
        hidden_act="silu",
        rms_norm_eps=config.model.eps,
        sliding_window=config.attention.window or None,
        num_local_experts=experts.count,
        num_experts_per_tok=experts.active,
    )


_ROUTED = in_block(
    {
        "ffn.router.weight": "block_sparse_moe.gate.weight",
        "ffn.experts.gate.weight": "block_sparse_moe.experts.{expert}.w1.weight",
        "ffn.experts.up.weight": "block_sparse_moe.experts.{expert}.w3.weight",
        "ffn.experts.down.weight": "block_sparse_moe.experts.{expert}.w2.weight",
    }
)
_PUBLISHED = dict(kv_heads=8, vocab=32000, tied=False, attention=dict(theta=1e6))

MIXTRAL = ModelFamily(
    name="mixtral",
    layers=_mixtral,
    attention=dict(ROTARY, window=0),
    model=dict(eps=1e-5),
    experts=dict(ALL_ALIKE, **OF_SOFTMAX, count=8, active=2, balance="microbatch"),
    weight_names={HUGGING_FACE: ENDS | NORMS | ATTENTION | _ROUTED},
    model_types=(ModelType("mixtral", "MixtralForCausalLM", _read_mixtral, _write_mixtral),),
    presets={
        "mixtral-8x7b": dict(_PUBLISHED, layers=32, width=4096, heads=32, ffn=14336),
        "mixtral-8x22b": dict(_PUBLISHED, layers=56, width=6144, heads=48, ffn=16384),
    },
)

"""Qwen3 (arXiv:2505.09388, section 2).

Llama with heads as wide as one likes, whose queries and keys are normed; dense, or with experts.
"""

from typing import Any

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.model.families.decoder import attentions, decoder, with_ends
from mpitrain.model.families.fields import (
    read_biases,
    read_eps,
    read_head_width,
    read_rope,
    read_silu,
    read_sizes,
    read_sparse_blocks,
    read_windows_if_used,
    window_letters,
    write_biases,
    write_head_width,
    write_rope,
    write_sizes,
    write_sparse_blocks,
    write_windows_if_used,
)
from mpitrain.model.families.names import BIASES, DENSE, HUGGING_FACE, NORMS_OF_HEADS, ROUTED
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.plan.declared.family import ALL_ALIKE, OF_SOFTMAX, ROTARY, WINDOWS, ModelFamily
from mpitrain.plan.declared.hugging_face import Fields, ModelType
from mpitrain.plan.declared.layer import ModelLayers


def _qwen3(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    return decoder(config, normed=True)


def _qwen3_moe(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    return with_ends(config, sparse_blocks(config, attentions(config, normed=True)))


def _read_qwen3(fields: Fields) -> None:
    read_sizes(fields, kv_heads=32)
    read_head_width(fields, 128)
    _read_common(fields)
    read_windows_if_used(fields)


def _read_common(fields: Fields) -> None:
    read_silu(fields)
    read_rope(fields, 10_000.0)
    read_eps(fields, 1e-6)
    read_biases(fields)


def _read_qwen3_moe(fields: Fields) -> None:
    read_sizes(fields, kv_heads=4)
    read_head_width(fields)
    _read_common(fields)
    _read_window_of_all(fields)
    read_sparse_blocks(fields)
    # 5.24 writes the second
    count = "num_experts" if "num_experts" in fields.tree else "num_local_experts"
    fields.take_no_notice("num_local_experts")
    fields.integer(count, 128, to="experts.count")
    fields.integer("num_experts_per_tok", 8, to="experts.active")
    fields.integer("moe_intermediate_size", 768, to="experts.width")
    fields.flag("norm_topk_prob", False, to="experts.normalised")
    # published with Qwen3-Coder besides; transformers doesn't read them
    fields.only("qkv_bias", False)
    fields.only("use_qk_norm", True)
    fields.only("shared_expert_intermediate_size", 0)


def _read_window_of_all(fields: Fields) -> None:
    """Read the window that all blocks of a Qwen3MoeModel have: it knows no other choice."""
    if fields.flag("use_sliding_window", False):
        fields.integer("sliding_window", 4096, to="attention.window", least=0, null=0)
    else:
        fields.take_no_notice("sliding_window")
        fields.give("attention.window", 0, "use_sliding_window")


def _write_common(config: Config) -> dict[str, Any]:
    return dict(
        write_sizes(config),
        **write_head_width(config),
        **write_rope(config),
        hidden_act="silu",
        rms_norm_eps=config.model.eps,
        **write_biases(config),
    )


def _write_qwen3(config: Config) -> dict[str, Any]:
    return dict(_write_common(config), **write_windows_if_used(config))


def _write_window_of_all(config: Config) -> dict[str, Any]:
    own = config.attention
    letters = set(window_letters(config))
    if len(letters) > 1:
        raise ConfigError(
            f'attention.window_blocks = "{own.window_blocks}" can\'t be written: Qwen3-MoE has windows in '
            'all blocks or in none; use "w"'
        )
    used = letters == {"w"}
    return dict(use_sliding_window=used, sliding_window=own.window if used else None)


def _write_qwen3_moe(config: Config) -> dict[str, Any]:
    experts = config.experts
    return dict(
        _write_common(config),
        **_write_window_of_all(config),
        **write_sparse_blocks(config),
        num_experts=experts.count,
        num_experts_per_tok=experts.active,
        moe_intermediate_size=experts.width,
        norm_topk_prob=experts.normalised,
    )


_KEYS = dict(ROTARY, **WINDOWS, theta=1_000_000.0, biases="none")
_DENSE = dict(kv_heads=8, vocab=151936, attention=dict(head_width=128))
_PUBLISHED = dict(kv_heads=4, vocab=151936, tied=False, attention=dict(head_width=128))

QWEN3 = ModelFamily(
    name="qwen3",
    layers=_qwen3,
    attention=_KEYS,
    model=dict(eps=1e-6),
    weight_names={HUGGING_FACE: DENSE | BIASES | NORMS_OF_HEADS},
    model_types=(ModelType("qwen3", "Qwen3ForCausalLM", _read_qwen3, _write_qwen3),),
    presets={  # arXiv:2505.09388, table 1, and config.json of Qwen/Qwen3-0.6B, ...
        "qwen3-0.6b": dict(_DENSE, layers=28, width=1024, heads=16, ffn=3072, tied=True),
        "qwen3-1.7b": dict(_DENSE, layers=28, width=2048, heads=16, ffn=6144, tied=True),
        "qwen3-4b": dict(_DENSE, layers=36, width=2560, heads=32, ffn=9728, tied=True),
        "qwen3-8b": dict(_DENSE, layers=36, width=4096, heads=32, ffn=12288, tied=False),
        "qwen3-14b": dict(_DENSE, layers=40, width=5120, heads=40, ffn=17408, tied=False),
        "qwen3-32b": dict(_DENSE, layers=64, width=5120, heads=64, ffn=25600, tied=False),
    },
)
QWEN3_MOE = ModelFamily(
    name="qwen3-moe",
    layers=_qwen3_moe,
    attention=_KEYS,
    model=dict(eps=1e-6),
    experts=dict(ALL_ALIKE, **OF_SOFTMAX, count=128, active=8, balance="global"),
    # blocks that experts.every leaves without experts have a feed-forward
    weight_names={HUGGING_FACE: DENSE | BIASES | NORMS_OF_HEADS | ROUTED},
    model_types=(ModelType("qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe),),
    presets={
        "qwen3-30b-a3b": dict(_PUBLISHED, layers=48, width=2048, heads=32, ffn=6144, experts=dict(width=768)),
        "qwen3-235b-a22b": dict(
            _PUBLISHED, layers=94, width=4096, heads=64, ffn=12288, experts=dict(width=1536)
        ),
    },
)

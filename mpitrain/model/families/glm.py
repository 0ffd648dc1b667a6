"""GLM-4.5 (arXiv:2508.06471, section 2.1).

Half of each head turns; queries, keys and values have biases. Experts are those of DeepSeek-V3: a
sigmoid of the router, with a bias that chooses, and a shared expert.
"""

from typing import Any

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.model.families.decoder import attentions, with_ends
from mpitrain.model.families.fields import (
    read_eps,
    read_head_width,
    read_rope,
    read_silu,
    read_sizes,
    write_experts,
    write_head_width,
    write_rope,
    write_sizes,
)
from mpitrain.model.families.names import (
    BIASES,
    DENSE,
    HUGGING_FACE,
    NORMS_OF_HEADS,
    ROUTED,
    SHARED_AND_BIAS,
)
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.plan.declared.family import ALL_ALIKE, ROTARY, ModelFamily, plain_heads, width_of_head
from mpitrain.plan.declared.hugging_face import Fields, ModelType
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.settings.attention import head_width


def _glm(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    return with_ends(config, sparse_blocks(config, attentions(config)))


def _half_of_heads(model: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return how many features of a head turn, if it is open: half of them."""
    width = found["head_width"] or width_of_head(model)
    turning = width // 2 if found["rotary_width"] is None else found["rotary_width"]
    plain_heads(model, {**found, "rotary_width": turning})
    return {"rotary_width": turning}


def _read(fields: Fields) -> None:
    read_sizes(fields, kv_heads=8)
    read_head_width(fields)
    read_silu(fields)
    _read_partial_rope(fields)
    read_eps(fields, 1e-5)
    biased = fields.flag("attention_bias", False)
    fields.give("attention.biases", "qkv" if biased else "none", "attention_bias")
    fields.flag("use_qk_norm", False, to="attention.normed")
    fields.integer("first_k_dense_replace", 1, least=0, to="experts.first")
    fields.integer("n_routed_experts", 128, to="experts.count")
    fields.integer("num_experts_per_tok", 8, to="experts.active")
    fields.integer("n_shared_experts", 1, least=0, to="experts.shared", null=0)
    fields.integer("moe_intermediate_size", 1408, to="experts.width")
    fields.integer("n_group", 1, to="experts.groups")
    fields.integer("topk_group", 1, to="experts.groups_active")
    fields.flag("norm_topk_prob", True, to="experts.normalised")
    fields.number("routed_scaling_factor", 1.0, to="experts.scale")
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.take_no_notice("num_local_experts")


def _read_partial_rope(fields: Fields) -> None:
    """Read positions, whose object in 5.x has the share of a head that turns; it rules."""
    name = fields.of_positions
    found = dict(fields.rope_objects()[name] or {})
    null = 1.0  # so transformers has it
    share = found.pop("partial_rotary_factor", fields.take("partial_rotary_factor", 0.5, null))
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        fields.refuse("partial_rotary_factor", "needed a number above 0, up to 1", share)
    width = fields.keys.get("attention.head_width")
    width = width or fields.keys["model.width"] // fields.keys["model.heads"]
    turning = int(width * share)
    if turning % 2 or not turning:
        fields.refuse("partial_rotary_factor", f"of {width} features {turning} turn; needed pairs", share)
    fields.give("attention.rotary_width", turning, "partial_rotary_factor")
    read_rope(fields, 10_000.0, found=found)


def _write(config: Config) -> dict[str, Any]:
    if config.attention.biases == "all":
        raise ConfigError("attention.biases = 'all' can't be written: GLM's output has none; use qkv or none")
    return dict(
        write_sizes(config),
        **write_head_width(config),
        **write_rope(config),
        partial_rotary_factor=(config.attention.rotary_width or head_width(config)) / head_width(config),
        hidden_act="silu",
        rms_norm_eps=config.model.eps,
        attention_bias=config.attention.biases == "qkv",
        use_qk_norm=bool(config.attention.normed),
        **write_experts(config),
    )


_NAMES = DENSE | BIASES | NORMS_OF_HEADS | ROUTED | SHARED_AND_BIAS
_PUBLISHED = dict(heads=96, kv_heads=8, vocab=151552, tied=False)
_ATTENTION = dict(theta=1_000_000.0, head_width=128)

GLM4_MOE = ModelFamily(
    name="glm-4.5",
    layers=_glm,
    # None: half of a head
    attention=dict(ROTARY, theta=1_000_000.0, rotary_width=None, biases="qkv", normed=False),
    model=dict(eps=1e-5),
    experts=dict(
        ALL_ALIKE, count=128, active=8, shared=1, first=1, score="sigmoid", normalised=True, scale=1.0,
        balance="bias", balance_weight=1e-4,
    ),
    heads=_half_of_heads,
    weight_names={HUGGING_FACE: _NAMES},
    model_types=(ModelType("glm4_moe", "Glm4MoeForCausalLM", _read, _write),),
    presets={
        "glm-4.5": dict(
            _PUBLISHED, layers=92, width=5120, ffn=12288, attention=dict(_ATTENTION, normed=True),
            experts=dict(count=160, width=1536, first=3, scale=2.5),
        ),
        "glm-4.5-air": dict(
            _PUBLISHED, layers=46, width=4096, ffn=10944, attention=_ATTENTION, experts=dict(width=1408)
        ),
    },
)  # fmt: skip

"""DeepSeek-V3 (arXiv:2412.19437, section 2.1).

It has latent attention; experts, some of which all tokens meet, behind a few dense blocks.
"""

from typing import Any

import numpy as np

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.model.families.decoder import with_ends
from mpitrain.model.families.fields import (
    read_eps,
    read_rope,
    read_silu,
    read_sizes,
    write_experts,
    write_rope,
    write_sizes,
)
from mpitrain.model.families.names import BLOCK, DENSE, HUGGING_FACE, ROUTED, SHARED_AND_BIAS, in_block
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.model.layers.latent_attention import LatentAttention, latent_heads
from mpitrain.model.layers.rope import rope_of
from mpitrain.plan.declared.family import ALL_ALIKE, ROTARY, ModelFamily
from mpitrain.plan.declared.hugging_face import Fields, ModelType, Stored, Views
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.settings.attention import head_width

LATENT_EPS = 1e-6  # of norms of latent vectors in the published code, whatever rms_norm_eps says


def _deepseek_v3(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    model = config.model
    own = config.attention
    sizes = head_width(config), own.value_width, own.q_rank, own.kv_rank
    rope = rope_of(own, own.rotary_width)
    attention = LatentAttention(
        model.width, model.heads, *sizes, rope, 2 * model.layers, model.eps, LATENT_EPS
    )
    return with_ends(config, sparse_blocks(config, [attention]))


def _read_deepseek_v3(fields: Fields) -> None:
    read_sizes(fields)
    if fields.keys.pop("model.kv_heads") != fields.keys["model.heads"]:
        fields.refuse("num_key_value_heads", "latent attention has keys for each of num_attention_heads")
    fields.lines = [line for line in fields.lines if not line.startswith("model.kv_heads")]
    read_silu(fields)
    _read_latent(fields)
    read_eps(fields, 1e-6)
    fields.only("attention_bias", False)
    fields.only("rope_interleave", True)
    fields.integer("first_k_dense_replace", 3, least=0, to="experts.first")
    fields.only("moe_layer_freq", 1)
    fields.integer("n_routed_experts", 256, to="experts.count")
    fields.integer("num_experts_per_tok", 8, to="experts.active")
    fields.integer("n_shared_experts", 1, least=0, to="experts.shared", null=0)
    fields.integer("moe_intermediate_size", 2048, to="experts.width")
    fields.integer("n_group", 8, to="experts.groups")
    fields.integer("topk_group", 4, to="experts.groups_active")
    fields.flag("norm_topk_prob", True, to="experts.normalised")
    fields.number("routed_scaling_factor", 2.5, to="experts.scale")
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    # of training alone, or the experts again
    fields.take_no_notice("aux_loss_alpha", "seq_aux", "ep_size", "num_local_experts")


def _read_latent(fields: Fields) -> None:
    """Read the sizes of heads and their positions. YaRN multiplies all scores by one factor here."""
    fields.integer("qk_nope_head_dim", 128, to="attention.head_width")
    rotary = fields.integer("qk_rope_head_dim", 64, to="attention.rotary_width")
    fields.integer("v_head_dim", 128, to="attention.value_width")
    fields.integer("kv_lora_rank", 512, to="attention.kv_rank")
    fields.integer("q_lora_rank", 1536, least=0, to="attention.q_rank", null=0)
    fields.only("head_dim", rotary)
    fields.only("qk_head_dim", rotary + fields.keys["attention.head_width"])
    read_rope(fields, 10_000.0)
    if "attention.yarn_factor" not in fields.keys:
        return
    name = fields.of_positions
    rope = fields.tree[name]
    sharper = rope.get("mscale_all_dim")
    if not sharper or rope.get("mscale") != sharper or rope.get("attention_factor") is not None:
        fields.refuse(name, "needed mscale and mscale_all_dim, equal, and no attention_factor")
    fields.give("attention.yarn_mscale", float(sharper), f"{name}.mscale_all_dim")


def _write_deepseek_v3(config: Config) -> dict[str, Any]:
    own = config.attention
    rope = write_rope(config)
    if (rope["rope_scaling"] or {}).get("rope_type") == "yarn":
        if not own.yarn_mscale:
            raise ConfigError(
                "attention.yarn_mscale = 0 can't be written: DeepSeek-V3 scales its scores with it; use 1"
            )
        rope["rope_scaling"].pop("attention_factor", None)
        rope["rope_scaling"] |= dict(mscale=own.yarn_mscale, mscale_all_dim=own.yarn_mscale)
    return dict(
        write_sizes(config),
        **rope,
        hidden_act="silu",
        rms_norm_eps=config.model.eps,
        attention_bias=False,
        rope_interleave=True,
        qk_nope_head_dim=head_width(config),
        qk_rope_head_dim=own.rotary_width,
        v_head_dim=own.value_width,
        kv_lora_rank=own.kv_rank,
        q_lora_rank=own.q_rank or None,
        **write_experts(config),
    )


def _pairs_of_halves(ours: np.ndarray, theirs: np.ndarray, group: int, rotary: int) -> Views:
    """Return views of rows in groups, of each of which the last `rotary` are halves here, pairs there."""
    ours, theirs = (x.reshape(-1, group, x.shape[-1]) for x in (ours, theirs))
    plain = group - rotary
    halves = ours[:, plain:].reshape(len(ours), 2, rotary // 2, -1)
    pairs = theirs[:, plain:].reshape(len(ours), rotary // 2, 2, -1).swapaxes(1, 2)
    return [(ours[:, :plain], theirs[:, :plain]), (halves, pairs)]


def _queries(ours: np.ndarray, theirs: np.ndarray, config: Config) -> Views:
    rotary = config.attention.rotary_width
    return _pairs_of_halves(ours, theirs, head_width(config) + rotary, rotary)


def _keys(ours: np.ndarray, theirs: np.ndarray, config: Config) -> Views:
    return _pairs_of_halves(ours, theirs, len(ours), config.attention.rotary_width)


def _name_of_queries(config: Config) -> str:
    return f"{BLOCK}self_attn.{'q_b_proj' if config.attention.q_rank else 'q_proj'}.weight"


_NAMES = (
    {
        ours: theirs
        for ours, theirs in DENSE.items()
        if not ours.endswith(("q.weight", "k.weight", "v.weight"))
    }
    | ROUTED
    | SHARED_AND_BIAS
    | in_block(
        {
            "attention.q_down.weight": "self_attn.q_a_proj.weight",
            "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
            "attention.q_up.weight": Stored(_name_of_queries, views=_queries),
            "attention.kv_down.weight": Stored(f"{BLOCK}self_attn.kv_a_proj_with_mqa.weight", views=_keys),
            "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
            "attention.kv_up.weight": "self_attn.kv_b_proj.weight",
        }
    )
)

DEEPSEEK_V3 = ModelFamily(
    name="deepseek-v3",
    layers=_deepseek_v3,
    # None: by the width of a head
    attention=dict(ROTARY, q_rank=None, kv_rank=None, rotary_width=None, value_width=None),
    model=dict(eps=1e-6),
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
    weight_names={HUGGING_FACE: _NAMES},
    model_types=(ModelType("deepseek_v3", "DeepseekV3ForCausalLM", _read_deepseek_v3, _write_deepseek_v3),),
    presets={
        "deepseek-v3": dict(
            layers=61,
            width=7168,
            heads=128,
            ffn=18432,
            vocab=129280,
            tied=False,
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

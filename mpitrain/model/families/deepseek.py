"""DeepSeek-V3 (arXiv:2412.19437, section 2.1): latent attention; after a few dense blocks experts,
some of which all tokens meet.
"""

from typing import Any

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.model.families.decoder import with_ends
from mpitrain.model.families.expert_fields import shared_and_routed
from mpitrain.model.families.fields import SILU, Ignored, Only, Unwritten, Whole, eps, optional, sizes
from mpitrain.model.families.names import BLOCK, DENSE, HUGGING_FACE, ROUTED, SHARED_AND_BIAS, in_block
from mpitrain.model.families.rope_fields import RopeField
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.model.layers.latent_attention import LatentAttention, latent_heads
from mpitrain.model.layers.rope import rope_of
from mpitrain.plan.declared.family import ALL_ALIKE, ROTARY, ModelFamily
from mpitrain.plan.declared.hugging_face import ConfigField, Fields, ModelType, Stored, Views
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.settings.attention import head_width

LATENT_EPS = 1e-6  # of norms of latent vectors in the published code, whatever rms_norm_eps says


def _deepseek_v3(config: ResolvedConfig) -> ModelLayers:
    model = config.model
    own = config.attention
    sizes = head_width(config), own.value_width, own.q_rank, own.kv_rank
    of_norms = 2 * model.layers, model.eps, LATENT_EPS
    rope = rope_of(own, own.rotary_width)
    attention = LatentAttention(model.width, model.heads, *sizes, rope, *of_norms)
    return with_ends(config, sparse_blocks(config, [attention]))


def _pairs_of_halves(ours: np.ndarray, theirs: np.ndarray, group: int, rotary: int) -> Views:
    """Return views of rows in groups, of each of which the last `rotary` are halves here, pairs there."""
    ours, theirs = (x.reshape(-1, group, x.shape[-1]) for x in (ours, theirs))
    plain = group - rotary
    halves = ours[:, plain:].reshape(len(ours), 2, rotary // 2, -1)
    pairs = theirs[:, plain:].reshape(len(ours), rotary // 2, 2, -1).swapaxes(1, 2)
    return [(ours[:, :plain], theirs[:, :plain]), (halves, pairs)]


def _queries(ours: np.ndarray, theirs: np.ndarray, config: ResolvedConfig) -> Views:
    rotary = config.attention.rotary_width
    return _pairs_of_halves(ours, theirs, head_width(config) + rotary, rotary)


def _keys(ours: np.ndarray, theirs: np.ndarray, config: ResolvedConfig) -> Views:
    return _pairs_of_halves(ours, theirs, len(ours), config.attention.rotary_width)


def _name_of_queries(config: ResolvedConfig) -> str:
    return f"{BLOCK}self_attn.{'q_b_proj' if config.attention.q_rank else 'q_proj'}.weight"


_QKV = "q.weight", "k.weight", "v.weight"
_NAMES = (
    {ours: theirs for ours, theirs in DENSE.items() if not ours.endswith(_QKV)}
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


class AllHeads(ConfigField):
    """Latent attention has keys for each head: no key says how many. After the sizes."""

    def read(self, fields: Fields) -> None:
        if fields.keys.pop("model.kv_heads") != fields.keys["model.heads"]:
            fields.refuse("num_key_value_heads", "latent attention has keys for each of num_attention_heads")
        fields.lines = [line for line in fields.lines if not line.startswith("model.kv_heads")]


class WidthsOfHeads:
    """What transformers has besides, by the widths that it has."""

    def read(self, fields: Fields) -> None:
        rotary = fields.keys["attention.rotary_width"]
        fields.only("head_dim", rotary)
        fields.only("qk_head_dim", rotary + fields.keys["attention.head_width"])

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return dict(qk_nope_head_dim=head_width(config))


class LatentRope(RopeField):
    """Positions. YaRN multiplies all scores by one factor here."""

    def read(self, fields: Fields) -> None:
        super().read(fields)
        if "attention.yarn_factor" not in fields.keys:
            return
        name = fields.positions_field
        rope = fields.tree[name]
        sharper = rope.get("mscale_all_dim")
        if not sharper or rope.get("mscale") != sharper or rope.get("attention_factor") is not None:
            fields.refuse(name, "needed mscale and mscale_all_dim, equal, and no attention_factor")
        fields.give("attention.yarn_mscale", float(sharper), f"{name}.mscale_all_dim")

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        own = config.attention
        rope = super().write(config)
        if (rope["rope_scaling"] or {}).get("rope_type") == "yarn":
            if not own.yarn_mscale:
                raise ConfigError(
                    "attention.yarn_mscale = 0 can't be written: DeepSeek-V3 scales its scores with it; use 1"
                )
            rope["rope_scaling"].pop("attention_factor", None)
            rope["rope_scaling"] |= dict(mscale=own.yarn_mscale, mscale_all_dim=own.yarn_mscale)
        return rope


_FIELDS = (
    *sizes(),
    AllHeads(),
    SILU,
    Whole("qk_nope_head_dim", "attention.head_width", 128),
    Whole("qk_rope_head_dim", "attention.rotary_width", 64),
    Whole("v_head_dim", "attention.value_width", 128),
    Whole("kv_lora_rank", "attention.kv_rank", 512),
    optional("q_lora_rank", "attention.q_rank", 1536),
    WidthsOfHeads(),
    LatentRope(10_000.0),
    eps(1e-6),
    Only("attention_bias", False),
    Only("rope_interleave", True),
    *shared_and_routed(dense=3, count=256, width=2048, groups=(8, 4), scale=2.5),
    Unwritten("moe_layer_freq", 1),
    Unwritten("scoring_func", "sigmoid"),
    Unwritten("topk_method", "noaux_tc"),
    # of training alone, or the experts again
    Ignored("aux_loss_alpha", "seq_aux", "ep_size", "num_local_experts"),
)

DEEPSEEK_V3 = ModelFamily(
    name="deepseek-v3",
    layers=_deepseek_v3,
    # None: by the width of a head
    attention=dict(ROTARY, q_rank=None, kv_rank=None, rotary_width=None, value_width=None),
    model=dict(eps=1e-6),
    experts=dict(
        ALL_ALIKE, count=256, active=8, shared=1, groups=8, groups_active=4, first=3, score="sigmoid",
        normalised=True, scale=2.5, balance="bias", balance_weight=1e-4,
    ),
    heads=latent_heads,
    grouped=False,
    weight_names={HUGGING_FACE: _NAMES},
    model_types=(ModelType("deepseek_v3", "DeepseekV3ForCausalLM", _FIELDS),),
    presets={
        "deepseek-v3": dict(
            layers=61, width=7168, heads=128, ffn=18432, vocab=129280, tied=False, experts=dict(width=2048),
            attention=dict(
                head_width=128, q_rank=1536, kv_rank=512, rotary_width=64, value_width=128, yarn_factor=40.0,
                yarn_length=4096,
            ),
        )
    },
)  # fmt: skip

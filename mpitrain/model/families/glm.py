"""GLM-4.5 (arXiv:2508.06471, section 2.1): half of each head turns; queries, keys and values have
biases. Experts are those of DeepSeek-V3: a sigmoid of the router, with a bias that chooses, and a
shared expert.
"""

from typing import Any

from mpitrain.model.families.expert_fields import shared_and_routed
from mpitrain.model.families.fields import SILU, Biases, Flag, HeadWidth, Ignored, Unwritten, eps, sizes
from mpitrain.model.families.names import BIASES, DENSE, HUGGING_FACE, NORMS_OF_HEADS, ROUTED, SHARED_AND_BIAS
from mpitrain.model.families.rope_fields import RopeField
from mpitrain.model.families.sparse import sparse_model
from mpitrain.plan.declared.family import ALL_ALIKE, ROTARY, ModelFamily, plain_heads, width_of_head
from mpitrain.plan.declared.hugging_face import Fields, ModelType
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.settings.attention import head_width


def _half_of_heads(model: Any, keys: dict[str, Any]) -> dict[str, Any]:
    """Return how many features of a head turn, if it is open: half of them."""
    width = keys["head_width"] or width_of_head(model)
    turning = width // 2 if keys["rotary_width"] is None else keys["rotary_width"]
    plain_heads(model, {**keys, "rotary_width": turning})
    return {"rotary_width": turning}


_NAMES = DENSE | BIASES | NORMS_OF_HEADS | ROUTED | SHARED_AND_BIAS
_PUBLISHED = dict(heads=96, kv_heads=8, vocab=151552, tied=False)
_ATTENTION = dict(theta=1_000_000.0, head_width=128)


class PartialRope(RopeField):
    """Positions, whose object in 5.x has the share of a head that turns; it rules."""

    def read(self, fields: Fields) -> None:
        rope = dict(fields.rope_objects()[fields.positions_field] or {})
        null = 1.0  # so transformers has it
        share = rope.pop("partial_rotary_factor", fields.take("partial_rotary_factor", 0.5, null))
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            fields.refuse("partial_rotary_factor", "needed a number above 0, up to 1", share)
        width = fields.keys.get("attention.head_width")
        width = width or fields.keys["model.width"] // fields.keys["model.heads"]
        turning = int(width * share)
        if turning % 2 or not turning:
            fields.refuse("partial_rotary_factor", f"of {width} features {turning} turn; needed pairs", share)
        fields.give("attention.rotary_width", turning, "partial_rotary_factor")
        super().read(fields, rope)

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        width = head_width(config)
        share = (config.attention.rotary_width or width) / width
        return dict(super().write(config), partial_rotary_factor=share)


_FIELDS = (
    *sizes(8),
    HeadWidth(),
    SILU,
    PartialRope(10_000.0),
    eps(1e-5),
    Biases("qkv", "'all' can't be written: GLM's output has none; use qkv or none"),
    Flag("use_qk_norm", "attention.normed", False),
    *shared_and_routed(dense=1, count=128, width=1408, groups=(1, 1), scale=1.0),
    Unwritten("scoring_func", "sigmoid"),
    Unwritten("topk_method", "noaux_tc"),
    Ignored("num_local_experts"),
)

GLM4_MOE = ModelFamily(
    name="glm-4.5",
    layers=sparse_model,
    # None: half of a head
    attention=dict(ROTARY, theta=1_000_000.0, rotary_width=None, biases="qkv", normed=False),
    model=dict(eps=1e-5),
    experts=dict(
        ALL_ALIKE, count=128, active=8, shared=1, first=1, score="sigmoid", normalised=True, scale=1.0,
        balance="bias", balance_weight=1e-4,
    ),
    heads=_half_of_heads,
    weight_names={HUGGING_FACE: _NAMES},
    model_types=(ModelType("glm4_moe", "Glm4MoeForCausalLM", _FIELDS),),
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

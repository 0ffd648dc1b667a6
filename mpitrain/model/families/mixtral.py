"""Mixtral (arXiv:2401.04088): Llama's attention, and experts instead of its feed-forward."""

from mpitrain.model.families.expert_fields import WidthOfExperts, routed
from mpitrain.model.families.fields import SILU, HeadWidth, eps, optional, sizes
from mpitrain.model.families.names import ATTENTION, ENDS, HUGGING_FACE, NORMS, in_block
from mpitrain.model.families.rope_fields import RopeField
from mpitrain.model.families.sparse import sparse_model
from mpitrain.plan.declared.family import ALL_ALIKE, OF_SOFTMAX, ROTARY, ModelFamily
from mpitrain.plan.declared.hugging_face import ModelType

_ROUTED = in_block(
    {
        "ffn.router.weight": "block_sparse_moe.gate.weight",
        "ffn.experts.gate.weight": "block_sparse_moe.experts.{expert}.w1.weight",
        "ffn.experts.up.weight": "block_sparse_moe.experts.{expert}.w3.weight",
        "ffn.experts.down.weight": "block_sparse_moe.experts.{expert}.w2.weight",
    }
)
_PUBLISHED = dict(kv_heads=8, vocab=32000, tied=False, attention=dict(theta=1e6))

_FIELDS = (
    *sizes(8),
    HeadWidth(),
    SILU,
    RopeField(1_000_000.0),
    eps(1e-5),
    optional("sliding_window", "attention.window", 0),
    *routed(8, 2),
    WidthOfExperts(),
)

MIXTRAL = ModelFamily(
    name="mixtral",
    layers=sparse_model,
    attention=dict(ROTARY, window=0),
    model=dict(eps=1e-5),
    experts=dict(ALL_ALIKE, **OF_SOFTMAX, count=8, active=2, balance="microbatch"),
    weight_names={HUGGING_FACE: ENDS | NORMS | ATTENTION | _ROUTED},
    model_types=(ModelType("mixtral", "MixtralForCausalLM", _FIELDS),),
    presets={
        "mixtral-8x7b": dict(_PUBLISHED, layers=32, width=4096, heads=32, ffn=14336),
        "mixtral-8x22b": dict(_PUBLISHED, layers=56, width=6144, heads=48, ffn=16384),
    },
)

"""OLMo 2 and 3 (arXiv:2501.00656, section 3; 2512.13961).

Llama with norms after sublayers, and none before; queries and keys are normed over all heads
together. OLMo 3 has windows in three of four blocks, and scales the positions of the others only.
"""

from functools import partial

from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.fields import SILU, Biases, HeadWidth, eps, sizes
from mpitrain.model.families.names import (
    ATTENTION,
    BIASES,
    ENDS,
    FEED_FORWARD,
    HUGGING_FACE,
    NORMS_OF_HEADS,
    in_block,
)
from mpitrain.model.families.rope_fields import RopeByKind, RopeField
from mpitrain.model.families.window_fields import Windows
from mpitrain.plan.declared.family import ROTARY, WINDOWS, ModelFamily
from mpitrain.plan.declared.hugging_face import ModelType
from mpitrain.plan.declared.parameters import NormKind

_NAMES = (
    ENDS
    | ATTENTION
    | BIASES
    | NORMS_OF_HEADS
    | FEED_FORWARD
    | in_block(
        {
            "attention.post_norm.weight": "post_attention_layernorm.weight",
            "ffn.post_norm.weight": "post_feedforward_layernorm.weight",
        }
    )
)
_layers = partial(decoder, kind=NormKind.NONE, norm_after=NormKind.RMS, normed_whole=True)
_OLMO2 = dict(vocab=100352, tied=False)
_7B = dict(layers=32, width=4096, heads=32, kv_heads=32, ffn=11008)
_32B = dict(layers=64, width=5120, heads=40, kv_heads=8, ffn=27648)
_OLMO3 = dict(vocab=100278, tied=False, attention=dict(yarn_factor=8.0, yarn_length=8192))

_COMMON = (*sizes(), HeadWidth(), SILU, eps(1e-5), Biases())
_OLMO2_FIELDS = (*_COMMON, RopeField(10_000.0))
_OLMO3_FIELDS = (*_COMMON, Windows("wwwf"), RopeByKind(500_000.0, 500_000.0))


OLMO2 = ModelFamily(
    name="olmo2",
    layers=_layers,
    attention=dict(ROTARY, theta=500_000.0, biases="none"),
    model=dict(eps=1e-6),
    weight_names={HUGGING_FACE: _NAMES},
    model_types=(ModelType("olmo2", "Olmo2ForCausalLM", _OLMO2_FIELDS),),
    presets={
        "olmo2-1b": dict(_OLMO2, layers=16, width=2048, heads=16, kv_heads=16, ffn=8192),
        "olmo2-7b": dict(_OLMO2, **_7B),
        "olmo2-13b": dict(_OLMO2, layers=40, width=5120, heads=40, kv_heads=40, ffn=13824),
        "olmo2-32b": dict(_OLMO2, **_32B),
    },
)
OLMO3 = ModelFamily(
    name="olmo3",
    layers=_layers,
    attention=dict(
        ROTARY,
        **WINDOWS | dict(window=4096, window_blocks="wwwf"),
        theta=500_000.0,
        window_theta=500_000.0,
        biases="none",
    ),
    model=dict(eps=1e-6),
    weight_names={HUGGING_FACE: _NAMES},
    model_types=(ModelType("olmo3", "Olmo3ForCausalLM", _OLMO3_FIELDS),),
    presets={"olmo3-7b": dict(_OLMO3, **_7B), "olmo3-32b": dict(_OLMO3, **_32B)},
)

"""Qwen2 and Qwen2.5 (arXiv:2407.10671, section 2.2; 2412.15115, section 2): Llama whose queries,
keys and values have biases; later blocks can have a window.
"""

from functools import partial

from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.fields import SILU, HeadWidth, eps, sizes
from mpitrain.model.families.names import BIASES, DENSE, HUGGING_FACE
from mpitrain.model.families.rope_fields import RopeField
from mpitrain.model.families.window_fields import WindowsIfUsed
from mpitrain.plan.declared.family import ROTARY, WINDOWS, ModelFamily
from mpitrain.plan.declared.hugging_face import ModelType

_SMALL = dict(vocab=151936, tied=True)
_LARGE = dict(vocab=152064, tied=False)

_FIELDS = (*sizes(32), HeadWidth(), SILU, RopeField(10_000.0), eps(1e-6), WindowsIfUsed())

QWEN2 = ModelFamily(
    name="qwen2",
    layers=partial(decoder, biased=True),
    attention=dict(ROTARY, **WINDOWS, theta=1_000_000.0),
    model=dict(eps=1e-6),
    weight_names={HUGGING_FACE: DENSE | BIASES},
    model_types=(ModelType("qwen2", "Qwen2ForCausalLM", _FIELDS),),
    presets={
        "qwen2.5-0.5b": dict(_SMALL, layers=24, width=896, heads=14, kv_heads=2, ffn=4864),
        "qwen2.5-1.5b": dict(_SMALL, layers=28, width=1536, heads=12, kv_heads=2, ffn=8960),
        "qwen2.5-3b": dict(_SMALL, layers=36, width=2048, heads=16, kv_heads=2, ffn=11008),
        "qwen2.5-7b": dict(_LARGE, layers=28, width=3584, heads=28, kv_heads=4, ffn=18944),
        # eps of the bases of these sizes
        "qwen2.5-14b": dict(_LARGE, layers=48, width=5120, heads=40, kv_heads=8, ffn=13824, eps=1e-5),
        "qwen2.5-32b": dict(_LARGE, layers=64, width=5120, heads=40, kv_heads=8, ffn=27648, eps=1e-5),
        "qwen2.5-72b": dict(_LARGE, layers=80, width=8192, heads=64, kv_heads=8, ffn=29568, eps=1e-5),
    },
)

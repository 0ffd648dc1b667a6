"""Mistral 7B (arXiv:2310.06825): Llama, whose attention sees a window in every block."""

from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.fields import SILU, HeadWidth, eps, optional, sizes
from mpitrain.model.families.names import DENSE, HUGGING_FACE
from mpitrain.model.families.rope_fields import RopeField
from mpitrain.plan.declared.family import ROTARY, ModelFamily
from mpitrain.plan.declared.hugging_face import ModelType

_PUBLISHED = dict(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, tied=False)

_FIELDS = (
    *sizes(8),
    HeadWidth(),
    SILU,
    RopeField(10_000.0),
    eps(1e-6),
    optional("sliding_window", "attention.window", 4096),
)

MISTRAL = ModelFamily(
    name="mistral",
    layers=decoder,
    attention=dict(ROTARY, window=4096),
    model=dict(eps=1e-5),
    weight_names={HUGGING_FACE: DENSE},
    model_types=(ModelType("mistral", "MistralForCausalLM", _FIELDS),),
    presets={
        "phi3-mini": dict(  # config.json of microsoft/Phi-3-mini-4k-instruct; arXiv:2404.14219
            layers=32, width=3072, heads=32, kv_heads=32, ffn=8192, vocab=32064, tied=False,
            attention=dict(window=2047),
        ),
        "mistral-7b": dict(_PUBLISHED, vocab=32000),
        # without a window, and theta 1e6
        "mistral-7b-v0.3": dict(_PUBLISHED, vocab=32768, attention=dict(theta=1e6, window=0)),
    },
)  # fmt: skip

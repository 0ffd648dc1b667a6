"""Mistral 7B (arXiv:2310.06825): Llama, whose attention sees a window in every block."""

from mpitrain.layout.family import ROTARY, WINDOWS, ModelFamily
from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.names import DENSE, HUGGING_FACE

_PUBLISHED = dict(layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, tied=False)

MISTRAL = ModelFamily(
    name="mistral",
    layers=decoder,
    attention=dict(ROTARY, **WINDOWS | dict(window=4096)),
    model=dict(eps=1e-5),
    weight_names={HUGGING_FACE: DENSE},
    presets={
        "mistral-7b": dict(_PUBLISHED, vocab=32000),
        # without a window, and theta 1e6
        "mistral-7b-v0.3": dict(_PUBLISHED, vocab=32768, attention=dict(theta=1e6, window=0)),
    },
)

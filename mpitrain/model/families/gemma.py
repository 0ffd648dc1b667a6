"""Gemma 2 and 3 (arXiv:2408.00118, section 2; 2503.19786, section 2), the latter of texts alone.

They have norms before and after each sublayer, which multiply by 1 + weight; GEGLU; embeddings
times the root of the width; windows in turn with attention to all positions. Gemma 2 caps scores
and logits; Gemma 3 norms queries and keys, and positions of blocks with a window have a theta of
their own.
"""

from functools import partial
from typing import Any

from mpitrain.kernels.activation_functions import Gelu
from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.fields import (
    Biases,
    HeadWidth,
    Ignored,
    Number,
    Only,
    Whole,
    eps,
    sizes,
    value_of,
)
from mpitrain.model.families.names import BIASES, DENSE, HUGGING_FACE, NORMS_AROUND, NORMS_OF_HEADS
from mpitrain.model.families.rope_fields import RopeByKind, RopeField
from mpitrain.model.families.window_fields import Windows
from mpitrain.plan.declared.family import ROTARY, WINDOWS, ModelFamily
from mpitrain.plan.declared.hugging_face import ConfigField, Fields, ModelType
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.declared.parameters import NormKind
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.settings.attention import head_width

KIND = NormKind.RMS_PLUS_ONE


def _gemma(config: ResolvedConfig, normed: bool = False) -> ModelLayers:
    """Return the layers of a resolved configuration's model. normed: queries and keys are."""
    scale = config.model.width**0.5
    return decoder(config, kind=KIND, norm_after=KIND, activation=Gelu(), scale=scale, normed=normed)


_KEYS = dict(ROTARY, **WINDOWS | dict(window=4096), biases="none", score_width=0)
_GEMMA2 = dict(vocab=256000, tied=True)
_GEMMA3 = dict(vocab=262208, tied=True)
# longer sequences than were trained with, by blocks that see all positions
_LONG = dict(head_width=256, score_width=256, window=1024, linear_factor=8.0)


class ScoreWidth(Whole):
    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return {self.name: config.attention.score_width or head_width(config)}


class Cap(Number):
    """A cap of scores or logits, or null; 0 isn't that: transformers divides by it."""

    def read(self, fields: Fields) -> None:
        if fields.take(self.name, self.default, null="none") == "none":
            fields.give(self.key, 0.0, self.name)
        else:
            super().read(fields)

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return {self.name: value_of(config, self.key) or None}


class NoCaps(ConfigField):
    def read(self, fields: Fields) -> None:
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if fields.take(name, None, null=0):
                fields.refuse(name, "needed null in a model of this family")


class WindowsByPattern(Windows):
    """Windows; where layer_types is absent, by sliding_window_pattern, in 5.x after an underscore."""

    def read(self, fields: Fields) -> None:
        fields.take_no_notice("_sliding_window_pattern")
        every, layers = fields.integer("sliding_window_pattern", 6), fields.keys["model.layers"]
        letters = ("w" if number % every else "f" for number in range(1, layers + 1))
        Windows("".join(letters)).read(fields)


_COMMON = (
    *sizes(4, tied=True),
    HeadWidth(256, divides=True),
    # it rules, whatever hidden_act says beside it
    Only("hidden_activation", "gelu_pytorch_tanh", "gelu_new"),
    Ignored("hidden_act"),
    eps(1e-6),
    Biases(),
    ScoreWidth("query_pre_attn_scalar", "attention.score_width", 256),
)
_GEMMA2_FIELDS = (
    *_COMMON,
    RopeField(10_000.0),
    Windows("wf"),
    Ignored("sliding_window_size"),  # published besides
    Cap("attn_logit_softcapping", "attention.score_cap", 50),
    Cap("final_logit_softcapping", "model.logit_cap", 30),
)
_GEMMA3_FIELDS = (
    *_COMMON,
    NoCaps(),
    WindowsByPattern(),
    RopeByKind(1_000_000.0, 10_000.0, "rope_local_base_freq"),
)


GEMMA2 = ModelFamily(
    name="gemma2",
    layers=_gemma,
    attention=dict(_KEYS, window_blocks="wf", score_cap=50.0),
    model=dict(eps=1e-6, logit_cap=30.0),
    weight_names={HUGGING_FACE: DENSE | NORMS_AROUND | BIASES},
    model_types=(ModelType("gemma2", "Gemma2ForCausalLM", _GEMMA2_FIELDS),),
    presets={
        "gemma2-2b": dict(
            _GEMMA2, layers=26, width=2304, heads=8, kv_heads=4, ffn=9216,
            attention=dict(head_width=256, score_width=256),
        ),
        "gemma2-9b": dict(
            _GEMMA2, layers=42, width=3584, heads=16, kv_heads=8, ffn=14336,
            attention=dict(head_width=256, score_width=256),
        ),
        "gemma2-27b": dict(
            _GEMMA2, layers=46, width=4608, heads=32, kv_heads=16, ffn=36864,
            attention=dict(head_width=128, score_width=144),
        ),
    },
)  # fmt: skip
GEMMA3 = ModelFamily(
    name="gemma3",
    layers=partial(_gemma, normed=True),
    attention=dict(_KEYS, window_blocks="wwwwwf", theta=1_000_000.0, window_theta=10_000.0),
    model=dict(eps=1e-6),
    weight_names={HUGGING_FACE: DENSE | NORMS_AROUND | BIASES | NORMS_OF_HEADS},
    model_types=(ModelType("gemma3_text", "Gemma3ForCausalLM", _GEMMA3_FIELDS),),
    presets={
        "gemma3-1b": dict(
            _GEMMA3, vocab=262144, layers=26, width=1152, heads=4, kv_heads=1, ffn=6912,
            attention=dict(head_width=256, score_width=256, window=512),
        ),
        "gemma3-4b": dict(_GEMMA3, layers=34, width=2560, heads=8, kv_heads=4, ffn=10240, attention=_LONG),
        "gemma3-12b": dict(_GEMMA3, layers=48, width=3840, heads=16, kv_heads=8, ffn=15360, attention=_LONG),
        "gemma3-27b": dict(
            _GEMMA3, layers=62, width=5376, heads=32, kv_heads=16, ffn=21504,
            attention=dict(_LONG, head_width=128, score_width=168),
        ),
    },
)  # fmt: skip

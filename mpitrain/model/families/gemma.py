"""Gemma 2 and 3 (arXiv:2408.00118, section 2; 2503.19786, section 2), the latter of texts alone.

Norms before and behind each sublayer, which multiply by 1 + weight; GEGLU; embeddings times the root of the
width; windows in turn with attention to all positions. Gemma 2 caps scores and logits; Gemma 3 norms queries
and keys, and positions of blocks with a window have a theta of their own.
"""

from mpitrain.config import Config
from mpitrain.kernels.gates import Gelu
from mpitrain.layout.family import ROTARY, WINDOWS, ModelFamily
from mpitrain.layout.layer import ModelLayers
from mpitrain.layout.parameters import NormKind
from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.names import BIASES, DENSE, HUGGING_FACE, NORMS_AROUND, NORMS_OF_HEADS

KIND = NormKind.RMS_PLUS_ONE


def _gemma2(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    return decoder(config, kind=KIND, behind=KIND, gate=Gelu(), scale=config.model.width**0.5)


def _gemma3(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    scale = config.model.width**0.5
    return decoder(config, kind=KIND, behind=KIND, gate=Gelu(), scale=scale, normed=True)


_KEYS = dict(ROTARY, **WINDOWS | dict(window=4096), biases="none", score_width=256.0, score_cap=0.0)
_GEMMA2 = dict(vocab=256000, tied=True)
_GEMMA3 = dict(vocab=262208, tied=True)
# longer sequences than were trained with, by blocks that see all positions
_LONG = dict(head_width=256, window=1024, linear_factor=8.0)

GEMMA2 = ModelFamily(
    name="gemma2",
    layers=_gemma2,
    attention=dict(_KEYS, window_blocks="wf", score_cap=50.0),
    model=dict(eps=1e-6, logit_cap=30.0),
    weight_names={HUGGING_FACE: DENSE | NORMS_AROUND | BIASES},
    presets={
        "gemma2-2b": dict(
            _GEMMA2, layers=26, width=2304, heads=8, kv_heads=4, ffn=9216, attention=dict(head_width=256)
        ),
        "gemma2-9b": dict(
            _GEMMA2, layers=42, width=3584, heads=16, kv_heads=8, ffn=14336, attention=dict(head_width=256)
        ),
        "gemma2-27b": dict(
            _GEMMA2, layers=46, width=4608, heads=32, kv_heads=16, ffn=36864,
            attention=dict(head_width=128, score_width=144.0),
        ),
    },
)  # fmt: skip
GEMMA3 = ModelFamily(
    name="gemma3",
    layers=_gemma3,
    attention=dict(_KEYS, window_blocks="wwwwwf", theta=1_000_000.0, window_theta=10_000.0),
    model=dict(eps=1e-6, logit_cap=0.0),
    weight_names={HUGGING_FACE: DENSE | NORMS_AROUND | BIASES | NORMS_OF_HEADS},
    presets={
        "gemma3-1b": dict(
            _GEMMA3, vocab=262144, layers=26, width=1152, heads=4, kv_heads=1, ffn=6912,
            attention=dict(head_width=256, window=512),
        ),
        "gemma3-4b": dict(_GEMMA3, layers=34, width=2560, heads=8, kv_heads=4, ffn=10240, attention=_LONG),
        "gemma3-12b": dict(_GEMMA3, layers=48, width=3840, heads=16, kv_heads=8, ffn=15360, attention=_LONG),
        "gemma3-27b": dict(
            _GEMMA3, layers=62, width=5376, heads=32, kv_heads=16, ffn=21504,
            attention=dict(_LONG, head_width=128, score_width=168.0),
        ),
    },
)  # fmt: skip

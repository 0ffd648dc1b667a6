"""gpt-oss (arXiv:2508.10925, section 2): biases everywhere, sinks, a window in every other block,
experts whose gates are clamped.
"""

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.kernels.activation_functions import Clamped
from mpitrain.model.families.decoder import attentions, with_ends
from mpitrain.model.families.expert_fields import WidthOfExperts, routed
from mpitrain.model.families.fields import SILU, HeadWidth, Ignored, Only, Unwritten, eps, sizes
from mpitrain.model.families.names import ATTENTION, BIASES, BLOCK, ENDS, HUGGING_FACE, NORMS, in_block
from mpitrain.model.families.rope_fields import RopeField
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.model.families.window_fields import Windows
from mpitrain.plan.declared.family import ALL_ALIKE, OF_SOFTMAX, ROTARY, ModelFamily
from mpitrain.plan.declared.hugging_face import ModelType, Shape, Stored, Views
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.declared.resolved import ResolvedConfig

LIMIT = 7.0


def _gpt_oss(config: ResolvedConfig) -> ModelLayers:
    """Return the layers of a model. Raises ConfigError if the biases of experts can't be divided."""
    model = config.model
    etp = config.parallel.etp
    if model.width % etp:
        raise ConfigError(
            f"model.width = {model.width}: the biases of experts don't divide over parallel.etp = {etp}; use "
            "a divisor"
        )
    attention = attentions(config, biased=True, biased_output=True, sinks=True)
    return with_ends(config, sparse_blocks(config, attention, biased=True, activation=Clamped(LIMIT)))


def _shape_of_both(ours: Shape, config: ResolvedConfig) -> Shape:
    """Return the shape of gate and up in one: [E, D, 2 I] of [E, I, D], [E, 2 I] of [E, I]."""
    return (ours[0], *ours[2:], 2 * ours[1])


def _gate(ours: np.ndarray, theirs: np.ndarray, config: ResolvedConfig) -> Views:
    return [(ours, theirs[..., 0::2].swapaxes(1, -1))]


def _up(ours: np.ndarray, theirs: np.ndarray, config: ResolvedConfig) -> Views:
    return [(ours, theirs[..., 1::2].swapaxes(1, -1))]


def _turned(ours: np.ndarray, theirs: np.ndarray, config: ResolvedConfig) -> Views:
    return [(ours, theirs.swapaxes(1, 2))]


_EXPERTS = f"{BLOCK}mlp.experts."
_NAMES = (
    ENDS
    | NORMS
    | ATTENTION
    | BIASES
    | in_block(
        {
            "attention.sinks": "self_attn.sinks",
            "ffn.router.weight": "mlp.router.weight",
            "ffn.router.logit_bias": "mlp.router.bias",
            # all experts in one tensor, inputs first; gate and up in turns
            "ffn.experts.gate.weight": Stored(f"{_EXPERTS}gate_up_proj", _shape_of_both, _gate),
            "ffn.experts.up.weight": Stored(f"{_EXPERTS}gate_up_proj", _shape_of_both, _up),
            "ffn.experts.gate.bias": Stored(f"{_EXPERTS}gate_up_proj_bias", _shape_of_both, _gate),
            "ffn.experts.up.bias": Stored(f"{_EXPERTS}gate_up_proj_bias", _shape_of_both, _up),
            "ffn.experts.down.weight": Stored(
                f"{_EXPERTS}down_proj", lambda ours, config: (ours[0], ours[2], ours[1]), _turned
            ),
            "ffn.experts.down.bias": "mlp.experts.down_proj_bias",
        }
    )
)
_ROPE = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
    original_max_position_embeddings=4096,
)  # fmt: skip
_PUBLISHED = dict(
    width=2880, heads=64, kv_heads=8, ffn=2880, vocab=201088, tied=False,
    attention=dict(head_width=64, yarn_factor=32.0, yarn_length=4096),
)  # fmt: skip

_FIELDS = (
    *sizes(8),
    HeadWidth(64),
    SILU,
    RopeField(150_000.0, _ROPE),
    Windows("wf", absent=128),
    Only("attention_bias", True),
    Only("swiglu_limit", LIMIT),
    Unwritten("swiglu_alpha", 1.702),
    eps(1e-5),
    *routed(128, 4),
    WidthOfExperts(),
    # the published files have them besides
    Ignored("experts_per_token", "initial_context_length"),
)

GPT_OSS = ModelFamily(
    name="gpt-oss",
    layers=_gpt_oss,
    attention=dict(ROTARY, theta=150_000.0, yarn_rounded=False, window=128, window_blocks="wf"),
    model=dict(eps=1e-5),
    experts=dict(ALL_ALIKE, **OF_SOFTMAX, count=32, active=4, balance="microbatch"),
    weight_names={HUGGING_FACE: _NAMES},
    model_types=(ModelType("gpt_oss", "GptOssForCausalLM", _FIELDS),),
    presets={
        "gpt-oss-20b": dict(_PUBLISHED, layers=24, experts=dict(count=32)),
        "gpt-oss-120b": dict(_PUBLISHED, layers=36, experts=dict(count=128)),
    },
)

"""GPT-2 (Radford et al. 2019, section 2.3), and GPT-3 (arXiv:2005.14165, section 2.1) without its
sparse attention: learned positions; LayerNorm; biases everywhere; a feed-forward with GELU, by tanh
or exact (Cerebras-GPT, arXiv:2304.03208), and no gate; dropout.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.kernels.activation_functions import Gelu
from mpitrain.model.families.decoder import attentions, with_ends
from mpitrain.model.families.fields import Flag, Ignored, Number, Unwritten, VocabularySize, Whole, eps
from mpitrain.model.families.names import HUGGING_FACE
from mpitrain.model.layers.feed_forward import FeedForward
from mpitrain.plan.declared.family import ModelFamily, width_of_head
from mpitrain.plan.declared.hugging_face import Fields, ModelType, Stored, Views
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.declared.parameters import NormKind
from mpitrain.plan.declared.resolved import ResolvedConfig, ResolvedModel

KIND = NormKind.LAYER
DROPOUTS = {  # fields of config.json, and our keys
    "embd_pdrop": "embedding_dropout",
    "attn_pdrop": "attention_dropout",
    "resid_pdrop": "residual_dropout",
}
GELU = {  # activation_function, and model.gelu
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_fast": "tanh",
    "gelu": "exact",
    "gelu_python": "exact",
}


def _gpt2(config: ResolvedConfig) -> ModelLayers:
    """Return the layers of a model. Raises ConfigError for a sequence without positions, and for
    further tokens.
    """
    model = config.model
    if config.data.sequence > model.positions:
        raise ConfigError(
            f"data.sequence = {config.data.sequence} is more than model.positions = {model.positions}, the "
            "positions that have learned vectors; lower the first or raise the second"
        )
    if model.mtp:
        raise ConfigError(
            f"model.mtp = {model.mtp}: further tokens aren't predicted with learned positions; leave it out"
        )
    rate = model.residual_dropout
    gelu = Gelu("none" if model.gelu == "exact" else "tanh")
    sizes = model.width, model.ffn, 2 * model.layers, model.eps
    ffn = FeedForward(*sizes, gelu, KIND, biased=True, gated=False, dropout=rate)
    own = attentions(
        config, kind=KIND, biased=True, biased_output=True, dropout=model.attention_dropout,
        residual_dropout=rate,
    )  # fmt: skip
    blocks = tuple(
        (replace(attention, block=number), replace(ffn, block=number)) for number, attention in enumerate(own)
    )
    return with_ends(config, blocks, kind=KIND)


def _heads(model: ResolvedModel, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return nothing. Raises ConfigError if heads don't divide the model's width."""
    width_of_head(model)
    return {}


_BLOCK = "transformer.h.{block}."


def _transposed(name: str) -> Stored:
    """Return the form of a Conv1D's weight: inputs first."""
    return Stored(name, lambda ours, config: ours[::-1], lambda ours, theirs, config: [(ours, theirs.T)])


def _part(name: str, number: int) -> Stored:
    """Return the form of queries, keys or values, which lie side by side in one tensor. number: of these."""

    def views(ours: np.ndarray, theirs: np.ndarray, config: ResolvedConfig) -> Views:
        return [(ours, theirs[..., number * len(ours) : (number + 1) * len(ours)].T)]

    return Stored(name, lambda ours, config: (*ours[1:], 3 * ours[0]), views)


def _names() -> dict[str, str | Stored]:
    inside: dict[str, str | Stored] = {}
    for number, name in enumerate("qkv"):
        for kind in ("weight", "bias"):
            inside[f"attention.{name}.{kind}"] = _part(f"{_BLOCK}attn.c_attn.{kind}", number)
    for ours, theirs in (
        ("attention.output", "attn.c_proj"),
        ("ffn.up", "mlp.c_fc"),
        ("ffn.down", "mlp.c_proj"),
    ):
        inside[f"{ours}.weight"] = _transposed(f"{_BLOCK}{theirs}.weight")
        inside[f"{ours}.bias"] = f"{_BLOCK}{theirs}.bias"
    for ours, theirs in (("attention.norm", "ln_1"), ("ffn.norm", "ln_2")):
        inside |= {f"{ours}.{kind}": f"{_BLOCK}{theirs}.{kind}" for kind in ("weight", "bias")}
    return {
        "embedding.weight": "transformer.wte.weight",
        "embedding.positions": "transformer.wpe.weight",
        "head.norm.weight": "transformer.ln_f.weight",
        "head.norm.bias": "transformer.ln_f.bias",
        "head.weight": "lm_head.weight",
        **{f"blocks.{{block}}.{ours}": theirs for ours, theirs in inside.items()},
    }


def _sizes(layers: int, width: int, heads: int, **more: Any) -> dict[str, Any]:
    return dict(layers=layers, width=width, heads=heads, ffn=4 * width, tied=True, vocab=50257, **more)


class GeluField:
    """GELU, by tanh or exact."""

    def read(self, fields: Fields) -> None:
        fields.only("activation_function", *GELU)
        name = fields.take("activation_function", "gelu_new")
        fields.give("model.gelu", GELU[name], "activation_function")

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return dict(activation_function="gelu" if config.model.gelu == "exact" else "gelu_new")


_FIELDS = (
    # transformers reads sizes by either name (GPT2Config.attribute_map)
    Whole("n_layer", "model.layers", other="num_hidden_layers"),
    Whole("n_embd", "model.width", other="hidden_size"),
    Whole("n_head", "model.heads", other="num_attention_heads"),
    Whole("n_inner", "model.ffn", lambda fields: 4 * fields.keys["model.width"]),
    VocabularySize(),
    Whole("n_positions", "model.positions", 1024, other="max_position_embeddings"),
    Flag("tie_word_embeddings", "model.tied", True),
    eps(1e-5, "layer_norm_epsilon"),
    GeluField(),
    Unwritten("scale_attn_weights", True),
    Unwritten("scale_attn_by_inverse_layer_idx", False),
    Unwritten("reorder_and_upcast_attn", False),
    *(Number(name, f"model.{key}", 0.1, share=True) for name, key in DROPOUTS.items()),
    Ignored("n_ctx"),
)

GPT2 = ModelFamily(
    name="gpt2",
    layers=_gpt2,
    attention={},
    model=dict(eps=1e-5, positions=1024, gelu="tanh", **dict.fromkeys(DROPOUTS.values(), 0.0)),
    heads=_heads,
    grouped=False,
    weight_names={HUGGING_FACE: _names()},
    model_types=(
        ModelType(
            "gpt2", "GPT2LMHeadModel", _FIELDS,
            # masks
            ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",), prefix="transformer.",
        ),
    ),
    presets={
        "gpt2": _sizes(12, 768, 12),
        "gpt2-medium": _sizes(24, 1024, 16),
        "gpt2-large": _sizes(36, 1280, 20),
        "gpt2-xl": _sizes(48, 1600, 25),
        # arXiv:2005.14165, table 2.1
        "gpt3-175b": _sizes(96, 12288, 96, positions=2048),
        # arXiv:2104.04473, table 1
        "gpt-1t": dict(_sizes(128, 25600, 160, positions=2048), vocab=51200),
    },
)  # fmt: skip

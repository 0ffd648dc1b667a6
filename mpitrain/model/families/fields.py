"""Fields of config.json that families share (transformers 5.24), read and written."""

import math
from typing import Any

from mpitrain.config import Config
from mpitrain.plan.declared.hugging_face import Fields


def read_sizes(fields: Fields, *, kv_heads: int | None = None, tied: bool = False) -> None:
    """Read what all families have.

    kv_heads: where num_key_value_heads is absent; None: as many as heads. Null always means that.
    tied: where tie_word_embeddings is absent.
    """
    fields.integer("num_hidden_layers", to="model.layers")
    fields.integer("hidden_size", to="model.width")
    heads = fields.integer("num_attention_heads", to="model.heads")
    fields.integer("num_key_value_heads", kv_heads or heads, to="model.kv_heads", null=heads)
    fields.integer("intermediate_size", to="model.ffn")
    fields.integer("vocab_size", to="model.vocab")
    fields.flag("tie_word_embeddings", tied, to="model.tied")


def write_sizes(config: Config) -> dict[str, Any]:
    """Return what read_sizes() reads."""
    model = config.model
    return dict(
        num_hidden_layers=model.layers,
        hidden_size=model.width,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        intermediate_size=model.ffn,
        vocab_size=model.vocab - (model.padding or 0),
        tie_word_embeddings=model.tied,
        max_position_embeddings=config.data.sequence,
        initializer_range=0.02,
    )


def read_head_width(fields: Fields, default: int = 0) -> None:
    """Read head_dim. default: where it is absent; 0: the width over heads, as null always is."""
    width = fields.take("head_dim", default or None, null=None)
    if width is not None:
        fields.integer("head_dim", default, to="attention.head_width")
    elif fields.keys["model.width"] % fields.keys["model.heads"]:
        fields.refuse("head_dim", "absent, it means hidden_size / num_attention_heads, which is no number")


def write_head_width(config: Config) -> dict[str, Any]:
    """Return head_dim, as every reader wants it: never absent."""
    return dict(head_dim=config.attention.head_width or config.model.width // config.model.heads)


def read_silu(fields: Fields) -> None:
    """Refuse another activation than SiLU."""
    fields.only("hidden_act", "silu")


def read_rope(
    fields: Fields, theta: float, *, truncate: bool = True, default: dict[str, Any] | None = None
) -> None:
    """Read rotary positions: as they are, with YaRN, or with Llama 3.1's scaling.

    truncate: what YaRN's key of this name has to be: layers have one or the other.
    """
    rope = fields.rope(theta, ("default", "llama3", "yarn"), default=default)
    name = "rope_scaling" if fields.tree.get("rope_scaling") else "rope_parameters"
    kind = rope["rope_type"]
    fields.give("attention.theta", float(rope["rope_theta"]), "rope_theta")
    if kind == "default":
        return
    for key in ("factor", "original_max_position_embeddings"):
        if key not in rope:
            fields.refuse(name, f"rope_type {kind} without {key}, which is needed")
    if kind == "llama3":
        _give_llama3(fields, name, rope)
        return
    for key, value in dict(beta_fast=32, beta_slow=1, truncate=truncate).items():
        if rope.get(key, True if key == "truncate" else value) != value:
            fields.refuse(name, f"{key} = {rope.get(key, True)} of YaRN, needed {value} in this family")
    _give_yarn(fields, name, rope)


def _give_llama3(fields: Fields, name: str, rope: dict[str, Any]) -> None:
    for key in ("low_freq_factor", "high_freq_factor"):
        if key not in rope:
            fields.refuse(name, f"rope_type llama3 without {key}, which is needed")
    fields.give("attention.llama3_factor", float(rope["factor"]), f"{name}.factor")
    fields.give("attention.llama3_length", int(rope["original_max_position_embeddings"]), name)
    fields.give("attention.llama3_low", float(rope["low_freq_factor"]), name)
    fields.give("attention.llama3_high", float(rope["high_freq_factor"]), name)


def _give_yarn(fields: Fields, name: str, rope: dict[str, Any]) -> None:
    factor = float(rope["factor"])
    fields.give("attention.yarn_factor", factor, f"{name}.factor")
    fields.give("attention.yarn_length", int(rope["original_max_position_embeddings"]), name)
    magnitude = rope.get("attention_factor")
    both = rope.get("mscale"), rope.get("mscale_all_dim")
    if magnitude is None and all(both):
        magnitude = _magnitude(factor, both[0]) / _magnitude(factor, both[1])
    if magnitude is not None and factor > 1:
        sharper = (magnitude - 1) / (0.1 * math.log(factor))
        if sharper < 0:
            fields.refuse(name, f"attention_factor {magnitude:g} below 1, which no key has")
        fields.give("attention.yarn_mscale", sharper, name)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def write_rope(config: Config, *, truncate: bool = True) -> dict[str, Any]:
    """Return what read_rope() reads."""
    attention = config.attention
    found: dict[str, Any] = {"rope_type": "default"}
    if attention.llama3_factor is not None and attention.llama3_factor > 1:
        found = dict(
            rope_type="llama3",
            factor=attention.llama3_factor,
            low_freq_factor=attention.llama3_low,
            high_freq_factor=attention.llama3_high,
            original_max_position_embeddings=attention.llama3_length,
        )
    elif attention.yarn_factor is not None and attention.yarn_factor > 1:
        found = dict(
            rope_type="yarn",
            factor=attention.yarn_factor,
            original_max_position_embeddings=attention.yarn_length,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=truncate,
        )
        if attention.yarn_mscale != 1:
            found["attention_factor"] = _magnitude(attention.yarn_factor, attention.yarn_mscale)
    return with_theta(attention.theta, found)


def with_theta(theta: float, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions as 4.x writes them, which every reader understands."""
    return dict(rope_theta=theta, rope_scaling=None if rope["rope_type"] == "default" else rope)


def read_no_window(fields: Fields) -> None:
    """Refuse windows, of families that choose them by use_sliding_window and layer_types."""
    fields.only("use_sliding_window", False)
    fields.take_no_notice("sliding_window", "max_window_layers")
    kinds = fields.take("layer_types", None)
    if kinds is not None and kinds != ["full_attention"] * fields.keys["model.layers"]:
        fields.refuse("layer_types", "needed full_attention for each layer in a model of this family")


def read_sparse_blocks(fields: Fields) -> None:
    """Read which blocks have experts, as Qwen says it: every decoder_sparse_step-th but mlp_only_layers."""
    layers = fields.keys["model.layers"]
    step = fields.integer("decoder_sparse_step", 1)
    without = fields.take("mlp_only_layers", [])
    if not isinstance(without, list) or not all(isinstance(each, int) for each in without):
        fields.refuse("mlp_only_layers", "needed a list of numbers of layers")
    wanted = [(number + 1) % step == 0 and number not in without for number in range(layers)]
    for first, every in [
        (0, step),
        *((first, every) for first in range(layers) for every in range(1, layers)),
    ]:
        if wanted == has_experts(layers, first, every):
            fields.give("experts.first", first, "mlp_only_layers")
            fields.give("experts.every", every, "decoder_sparse_step")
            return
    fields.refuse("mlp_only_layers", "no experts.first and experts.every mean these blocks")


def has_experts(layers: int, first: int, every: int) -> list[bool]:
    """Return which blocks have experts."""
    return [number >= first and (number - first + 1) % every == 0 for number in range(layers)]


def write_sparse_blocks(config: Config) -> dict[str, Any]:
    """Return what read_sparse_blocks() reads."""
    first, every = config.experts.first, config.experts.every
    if first == 0:
        return dict(decoder_sparse_step=every, mlp_only_layers=[])
    blocks = has_experts(config.model.layers, first, every)
    return dict(
        decoder_sparse_step=1, mlp_only_layers=[number for number, each in enumerate(blocks) if not each]
    )

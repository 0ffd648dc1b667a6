"""Fields of config.json that families share (transformers 5.24), read and written."""

import math
from typing import Any

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.model.families.sparse import has_experts
from mpitrain.plan.declared.hugging_face import ROPE_KEYS, Fields
from mpitrain.plan.settings.attention import head_width


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
    return dict(head_dim=head_width(config))


def read_silu(fields: Fields) -> None:
    """Refuse another activation than SiLU."""
    fields.only("hidden_act", "silu")


def read_eps(fields: Fields, default: float, name: str = "rms_norm_eps") -> None:
    """Read what norms add to the mean of the squares."""
    fields.number(name, default, to="model.eps")


def read_biases(fields: Fields, *, ffn: bool = False) -> None:
    """Read whether the products of attention have biases, and with `ffn` those of feed-forwards."""
    biased = fields.flag("attention_bias", False)
    fields.give("attention.biases", "all" if biased else "none", "attention_bias")
    if ffn:
        fields.flag("mlp_bias", False, to="model.ffn_biased")


def write_biases(config: Config, *, ffn: bool = False) -> dict[str, Any]:
    """Return what read_biases() reads. Raises ConfigError for biases without that of the output."""
    if config.attention.biases == "qkv":
        raise ConfigError(
            "attention.biases = 'qkv' can't be written: attention_bias is of the output, too; use all or none"
        )
    return dict(attention_bias=config.attention.biases == "all") | (
        dict(mlp_bias=bool(config.model.ffn_biased)) if ffn else {}
    )


def read_rope(
    fields: Fields, theta: float, *, default: dict[str, Any] | None = None, layer_type: str = ""
) -> None:
    """Read rotary positions: as they are, or with a scaling for longer sequences.

    theta, default, layer_type: as in Fields.rope().
    """
    rope = fields.rope(theta, tuple(ROPE_KEYS), layer_type, default)
    name = fields.of_positions
    kind = rope["rope_type"]
    fields.give("attention.theta", float(rope["rope_theta"]), "rope_theta")
    needed = {"linear": ("factor",), "default": ()}.get(kind, ("factor", "original_max_position_embeddings"))
    for key in needed:
        if key not in rope:
            fields.refuse(name, f"rope_type {kind} without {key}, which is needed")
    if kind == "linear":
        fields.give("attention.linear_factor", float(rope["factor"]), f"{name}.factor")
    elif kind == "llama3":
        _give_llama3(fields, name, rope)
    elif kind == "yarn":
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
    fields.give("attention.yarn_fast", float(rope.get("beta_fast", 32)), f"{name}.beta_fast")
    fields.give("attention.yarn_slow", float(rope.get("beta_slow", 1)), f"{name}.beta_slow")
    fields.give("attention.yarn_rounded", bool(rope.get("truncate", True)), f"{name}.truncate")
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


def write_rope(config: Config) -> dict[str, Any]:
    """Return what read_rope() reads."""
    return with_theta(config.attention.theta, scaling(config))


def scaling(config: Config) -> dict[str, Any]:
    """Return rope_type, and what it has besides."""
    attention = config.attention
    if (attention.linear_factor or 1) > 1:
        return dict(rope_type="linear", factor=attention.linear_factor)
    if (attention.llama3_factor or 1) > 1:
        return dict(
            rope_type="llama3",
            factor=attention.llama3_factor,
            low_freq_factor=attention.llama3_low,
            high_freq_factor=attention.llama3_high,
            original_max_position_embeddings=attention.llama3_length,
        )
    if (attention.yarn_factor or 1) == 1:
        return dict(rope_type="default")
    found = dict(
        rope_type="yarn",
        factor=attention.yarn_factor,
        original_max_position_embeddings=attention.yarn_length,
        beta_fast=attention.yarn_fast,
        beta_slow=attention.yarn_slow,
        truncate=attention.yarn_rounded,
    )
    if attention.yarn_mscale != 1:
        found["attention_factor"] = _magnitude(attention.yarn_factor, attention.yarn_mscale)
    return found


def with_theta(theta: float, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of rotary positions as 4.x writes them, which every reader understands."""
    return dict(rope_theta=theta, rope_scaling=None if rope["rope_type"] == "default" else rope)


KINDS = {"w": "sliding_attention", "f": "full_attention"}  # by our letters


def read_rope_by_kind(fields: Fields, theta: float, window_theta: float = 0.0) -> None:
    """Read rotary positions, of which blocks with a window have a theta of their own, and no scaling.

    theta, window_theta: the class's; 0: as the others.
    """
    by_kind = KINDS["w"] in (fields.tree.get("rope_parameters") or {})
    read_rope(fields, theta, layer_type=KINDS["f"])
    local = window_theta or fields.keys["attention.theta"]
    if by_kind:
        own = fields.rope(window_theta or theta, tuple(ROPE_KEYS), KINDS["w"])
        local = own["rope_theta"]
        if own["rope_type"] != "default":
            if own != fields.rope(theta, tuple(ROPE_KEYS), KINDS["f"]):
                fields.refuse("rope_parameters", "windows scale positions otherwise, which no key has")
            local = 0
    fields.give("attention.window_theta", float(local), "rope_theta")


def write_rope_by_kind(config: Config) -> dict[str, Any]:
    """Return what read_rope_by_kind() reads."""
    own = config.attention
    of_all = dict(scaling(config), rope_theta=own.theta)
    local = dict(rope_type="default", rope_theta=own.window_theta) if own.window_theta else of_all
    return dict(rope_parameters={KINDS["f"]: of_all, KINDS["w"]: local})


def read_windows(fields: Fields, letters: str, *, absent: int = 4096) -> None:
    """Read the window, and by layer_types which blocks have it.

    letters: of each block, or of some in turns, where layer_types is absent.
    absent: the window where sliding_window is absent.
    """
    fields.integer("sliding_window", absent, to="attention.window", least=0, null=0)
    kinds = fields.take("layer_types", None)
    if not fields.keys["attention.window"]:
        return
    if kinds is not None:
        known = {kind: letter for letter, kind in KINDS.items()}
        layers = fields.keys["model.layers"]
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
            fields.refuse("layer_types", f"needed {' or '.join(known)} for each of {layers} layers")
        letters = "".join(known[kind] for kind in kinds)
    if "w" not in letters:
        fields.keys["attention.window"] = 0
        fields.lines[:] = [line for line in fields.lines if not line.startswith("attention.window ")]
        fields.lines.append("attention.window = 0  (no layer has it)")
        return
    fields.give("attention.window_blocks", in_turns(letters), "layer_types")


def read_windows_if_used(fields: Fields, letters: str = "", *, absent: int = 4096) -> None:
    """Read windows of families that have them by use_sliding_window.

    letters, absent: as in read_windows(); "": by max_window_layers.
    """
    if not fields.flag("use_sliding_window", False):
        fields.take_no_notice("sliding_window", "layer_types")
        fields.give("attention.window", 0, "use_sliding_window")
        return
    layers = fields.keys["model.layers"]
    first = fields.integer("max_window_layers", 28, least=0) if not letters else 0
    letters = letters or "".join("fw"[number >= first] for number in range(layers))
    read_windows(fields, letters, absent=absent)


def write_windows(config: Config) -> dict[str, Any]:
    """Return what read_windows() reads."""
    own = config.attention
    letters = own.window_blocks if own.window else "f"
    kinds = [KINDS[letters[number % len(letters)]] for number in range(config.model.layers)]
    return dict(sliding_window=own.window or None, layer_types=kinds)


def write_windows_if_used(config: Config) -> dict[str, Any]:
    """Return what read_windows_if_used() reads."""
    window = config.attention.window
    found = write_windows(config)
    first = found["layer_types"].index(KINDS["w"]) if window else config.model.layers
    return dict(found, use_sliding_window=bool(window), max_window_layers=first)


def in_turns(letters: str) -> str:
    """Return the fewest letters that give all of them, in turns."""
    lengths = range(1, len(letters) + 1)
    return next(
        letters[:n] for n in lengths if all(letters[i] == letters[i % n] for i in range(len(letters)))
    )


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


def write_sparse_blocks(config: Config) -> dict[str, Any]:
    """Return what read_sparse_blocks() reads."""
    first, every = config.experts.first, config.experts.every
    if first == 0:
        return dict(decoder_sparse_step=every, mlp_only_layers=[])
    blocks = has_experts(config.model.layers, first, every)
    return dict(
        decoder_sparse_step=1, mlp_only_layers=[number for number, each in enumerate(blocks) if not each]
    )


def write_experts(config: Config) -> dict[str, Any]:
    """Return the fields of experts as DeepSeek-V3 and GLM-4.5 have them."""
    experts = config.experts
    return dict(
        first_k_dense_replace=experts.first,
        n_routed_experts=experts.count,
        num_experts_per_tok=experts.active,
        n_shared_experts=experts.shared,
        moe_intermediate_size=experts.width,
        n_group=experts.groups,
        topk_group=experts.groups_active,
        norm_topk_prob=experts.normalised,
        routed_scaling_factor=experts.scale,
        num_nextn_predict_layers=0,
    )

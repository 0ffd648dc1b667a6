"""Fields of config.json that families share (transformers 5.24), read and written."""

import math
from collections.abc import Sequence
from typing import Any

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown
from mpitrain.model.families.sparse import has_experts
from mpitrain.plan.declared.hugging_face import ROPE_KEYS, Fields
from mpitrain.plan.settings.attention import head_width

MAX_POSITIONS = "max_position_embeddings"
ORIGINAL_POSITIONS = "original_max_position_embeddings"
MOST_LAYERS = 10_000  # as model.layers: what a stranger's file has of each layer is gone through


def read_sizes(fields: Fields, *, kv_heads: int | None = None, tied: bool = False) -> None:
    """Read what all families have.

    kv_heads: where num_key_value_heads is absent; None: as many as heads. Null always means that.
    tied: where tie_word_embeddings is absent.
    """
    fields.integer("num_hidden_layers", most=MOST_LAYERS, to="model.layers")
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
        max_position_embeddings=longest(config),
        initializer_range=0.02,
    )


def longest(config: Config) -> int:
    """Return max_position_embeddings: dynamic scaling begins there."""
    return config.attention.dynamic_length or config.data.sequence


def read_head_width(fields: Fields, default: int = 0) -> None:
    """Read head_dim. default: where it is absent; 0: the width over heads, as null always is."""
    width = fields.take("head_dim", default or None, null=None)
    if width is not None:
        fields.integer("head_dim", default, to="attention.head_width")
    elif fields.keys["model.width"] % fields.keys["model.heads"]:
        fields.refuse("head_dim", "absent, it means hidden_size / num_attention_heads, which is no number")


def write_head_width(config: Config, *, divides: bool = False) -> dict[str, Any]:
    """Return head_dim, as every reader wants it: never absent.

    divides: transformers 5 refuses a width that isn't a multiple of heads, whatever head_dim is.

    Raises ConfigError for one.
    """
    model = config.model
    if divides and model.width % model.heads:
        raise ConfigError(
            f"model.width = {model.width} with model.heads = {model.heads} can't be written: "
            f"transformers loads a {model.family} only if width is a multiple of heads; train "
            "mistral, qwen2 or qwen3 with these sizes, or others"
        )
    return dict(head_dim=head_width(config))


def read_silu(fields: Fields) -> None:
    """Refuse another activation than SiLU, which has two names."""
    fields.only("hidden_act", "silu", "swish")


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
    fields: Fields,
    theta: float,
    *,
    default: dict[str, Any] | None = None,
    found: dict[str, Any] | None = None,
) -> None:
    """Read rotary positions: as they are, or with a scaling for longer sequences.

    theta, default, found: as in Fields.rope().
    """
    rope = fields.rope(theta, tuple(ROPE_KEYS), default, found)
    name = fields.of_positions
    kind = rope["rope_type"]
    fields.give("attention.theta", float(rope["rope_theta"]), "rope_theta")
    if kind == "default":
        return
    if kind != "linear":
        rope = _with_length(fields, name, rope)
    if "factor" not in rope:
        fields.refuse(name, f"rope_type {kind} without factor, which is needed")
    if rope["factor"] < 1:
        fields.refuse(name, f"factor {rope['factor']:g} below 1, which no key has")
    if kind != "dynamic" and rope["factor"] == 1 and rope.get("attention_factor", 1) == 1:
        return  # the same as none
    if kind == "linear":
        fields.give("attention.linear_factor", float(rope["factor"]), f"{name}.factor")
    elif kind == "dynamic":
        fields.give("attention.dynamic_factor", float(rope["factor"]), f"{name}.factor")
        fields.give("attention.dynamic_length", rope[ORIGINAL_POSITIONS], name)
    elif kind == "llama3":
        _give_llama3(fields, name, rope)
    else:
        _give_yarn(fields, name, rope)


def _with_length(fields: Fields, name: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Return a scaling with the length that was trained with: the longest, unless another is there.

    transformers has the longest begin dynamic scaling, whatever else is there.

    Where YaRN's factor is absent, it is the longest sequence over that length.
    """
    most = fields.take(MAX_POSITIONS, None)
    length = most if rope["rope_type"] == "dynamic" else rope.get(ORIGINAL_POSITIONS, most)
    if length is None:
        needed = MAX_POSITIONS if rope["rope_type"] == "dynamic" else ORIGINAL_POSITIONS
        fields.refuse(name, f"rope_type {rope['rope_type']} without {needed}, which is needed")
    for where, value in ((name, length), (MAX_POSITIONS, most)):
        if value is not None and not _is_length(value):
            fields.refuse(where, f"needed a whole number of positions, found {shown(value)}")
    rope = {**rope, ORIGINAL_POSITIONS: int(length)}
    if rope["rope_type"] == "yarn" and most is not None:
        rope.setdefault("factor", most / length)
    return rope


def _is_length(value: Any) -> bool:
    """Return whether a value is a whole number from 1 on."""
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and 1 <= value < 2**31


def _give_llama3(fields: Fields, name: str, rope: dict[str, Any]) -> None:
    for key in ("low_freq_factor", "high_freq_factor"):
        if key not in rope:
            fields.refuse(name, f"rope_type llama3 without {key}, which is needed")
    _require_order(fields, name, rope["low_freq_factor"], rope["high_freq_factor"], "high_freq_factor")
    fields.give("attention.llama3_factor", float(rope["factor"]), f"{name}.factor")
    fields.give("attention.llama3_length", rope[ORIGINAL_POSITIONS], name)
    fields.give("attention.llama3_low", float(rope["low_freq_factor"]), name)
    fields.give("attention.llama3_high", float(rope["high_freq_factor"]), name)


def _require_order(fields: Fields, name: str, low: float, high: float, of_high: str) -> None:
    """Refuse a scaling without pairs between those that it slows and those that it leaves."""
    if low >= high:
        fields.refuse(name, f"{of_high} is {high:g}, needed above the other end, {low:g}")


def _give_yarn(fields: Fields, name: str, rope: dict[str, Any]) -> None:
    factor = float(rope["factor"])
    fast, slow = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
    _require_order(fields, name, slow, fast, "beta_fast")
    magnitude = rope.get("attention_factor")
    both = rope.get("mscale"), rope.get("mscale_all_dim")
    if magnitude is None and all(both):
        magnitude = _magnitude(factor, both[0]) / _magnitude(factor, both[1])
    if magnitude is not None and (magnitude < 1 or factor == 1):
        fields.refuse(name, f"attention_factor {magnitude:g} with factor {factor:g}, which no key has")
    fields.give("attention.yarn_factor", factor, f"{name}.factor")
    fields.give("attention.yarn_length", rope[ORIGINAL_POSITIONS], name)
    fields.give("attention.yarn_fast", fast, f"{name}.beta_fast")
    fields.give("attention.yarn_slow", slow, f"{name}.beta_slow")
    fields.give("attention.yarn_rounded", bool(rope.get("truncate", True)), f"{name}.truncate")
    if magnitude is not None:
        fields.give("attention.yarn_mscale", (magnitude - 1) / (0.1 * math.log(factor)), name)


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
    if attention.dynamic_length:
        return dict(rope_type="dynamic", factor=attention.dynamic_factor)
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


def read_rope_by_kind(fields: Fields, theta: float, window_theta: float, *, of_window: str = "") -> None:
    """Read rotary positions, of which blocks with a window have a theta of their own, and no scaling.

    Behind read_windows(). theta, window_theta: the class's.  of_window: 4.x's field of the latter; without
    one 4.x has one theta for all blocks, and 5.x the class's for those with a window: that is
    refused.
    """
    full, own = _objects_by_kind(fields)
    read_rope(fields, theta, found=full)
    local = fields.number(of_window, window_theta) if of_window else window_theta
    top = fields.tree.get("rope_theta")
    windowed = bool(fields.keys["attention.window"])
    if not of_window and top not in (None, theta) and "rope_theta" not in own and windowed:
        fields.refuse(
            "rope_theta",
            "transformers 5 has it for blocks without a window alone, 4 for all; give rope_parameters "
            f"instead, with rope_theta in each of {KINDS['f']} and {KINDS['w']}",
        )
    own = fields.rope(theta, tuple(ROPE_KEYS), found={"rope_theta": local, **own})
    if not windowed:
        return
    local = own["rope_theta"]
    if own["rope_type"] != "default":
        if own != fields.rope(theta, tuple(ROPE_KEYS), found=full):
            fields.refuse("rope_parameters", "windows scale positions otherwise, which no key has")
        local = 0
    fields.give("attention.window_theta", float(local), of_window or "rope_theta")


def _objects_by_kind(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the objects of blocks without and with a window, as transformers puts them together."""
    both = fields.rope_objects()
    found = both["rope_parameters"] or {}
    if found.keys() - set(KINDS.values()) or not all(
        isinstance(each, dict | None) for each in found.values()
    ):
        fields.refuse("rope_parameters", f"needed an object for {KINDS['f']}, and one for {KINDS['w']}")
    full, own = (dict(found.get(KINDS[letter]) or {}) for letter in "fw")
    scaling = both["rope_scaling"] or {}
    if "rope_type" not in scaling and scaling.get("type", "default") != "default":
        fields.refuse("rope_scaling", "transformers reads rope_type, not type, in this family; rename it")
    full |= scaling
    for each in (full, own):
        if each.get("truncate") is False:
            fields.refuse(
                fields.of_positions, "truncate false, which transformers passes over in this family"
            )
    return full, own


def write_rope_by_kind(config: Config) -> dict[str, Any]:
    """Return what read_rope_by_kind() reads. Raises ConfigError for what transformers passes over."""
    own = config.attention
    if own.yarn_factor > 1 and not own.yarn_rounded:
        raise ConfigError(
            "attention.yarn_rounded = false can't be written: transformers passes over it where blocks with "
            "a window have positions of their own; use true"
        )
    of_all = dict(scaling(config), rope_theta=own.theta)
    local = dict(rope_type="default", rope_theta=own.window_theta) if own.window_theta else of_all
    return dict(rope_parameters={KINDS["f"]: of_all, KINDS["w"]: local})


def read_windows(fields: Fields, letters: str, *, absent: int = 4096) -> None:
    """Read the window, and by layer_types which blocks have it.

    letters: of each block, or of some in turns, where layer_types is absent.
    absent: the window where sliding_window is absent.
    """
    fields.integer("sliding_window", absent, to="attention.window", least=0, null=0)
    letters = _letters(fields) or letters
    if not fields.keys["attention.window"]:
        return
    if "w" not in letters:
        fields.keys["attention.window"] = 0
        fields.lines[:] = [line for line in fields.lines if not line.startswith("attention.window ")]
        fields.lines.append("attention.window = 0  (no layer has it)")
        return
    fields.give("attention.window_blocks", in_turns(letters), "layer_types")


def _letters(fields: Fields) -> str:
    """Return which blocks have a window by layer_types, "" where it is absent."""
    kinds = fields.take("layer_types", None)
    if kinds is None:
        return ""
    known = {kind: letter for letter, kind in KINDS.items()}
    layers = fields.keys["model.layers"]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in list(known) for kind in kinds):
        fields.refuse("layer_types", f"needed {' or '.join(known)} for each of {layers} layers")
    return "".join(known[kind] for kind in kinds)


def read_windows_if_used(fields: Fields, letters: str = "", *, absent: int = 4096) -> None:
    """Read windows of families that have them by use_sliding_window.

    letters, absent: as in read_windows(); "": by max_window_layers.
    """
    if not fields.flag("use_sliding_window", False):
        if "w" in _letters(fields) and fields.take("sliding_window", None):
            fields.refuse(
                "layer_types", "windows with use_sliding_window false, which kernels of transformers read "
                "otherwise each; set it to true, or all layers to full_attention"
            )  # fmt: skip
        fields.take_no_notice("sliding_window")
        fields.give("attention.window", 0, "use_sliding_window")
        return
    layers = fields.keys["model.layers"]
    first = fields.integer("max_window_layers", 28, least=0) if not letters else 0
    letters = letters or "".join("fw"[number >= first] for number in range(layers))
    read_windows(fields, letters, absent=absent)


def write_windows(config: Config, *, absent: int | None = 4096) -> dict[str, Any]:
    """Return what read_windows() reads.

    absent: written where no block has a window: most classes of transformers need a number even
    then.
    """
    kinds = [KINDS[letter] for letter in window_letters(config)]
    return dict(sliding_window=config.attention.window or absent, layer_types=kinds)


def write_windows_if_used(config: Config) -> dict[str, Any]:
    """Return what read_windows_if_used() reads."""
    letters = window_letters(config) + "w"
    first = letters.index("w")
    used = first < config.model.layers
    return dict(write_windows(config, absent=None), use_sliding_window=used, max_window_layers=first)


def window_letters(config: Config) -> str:
    """Return a letter for each block: w, it has the window, or f."""
    letters = config.attention.window_blocks if config.attention.window else "f"
    return "".join(letters[number % len(letters)] for number in range(config.model.layers))


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
    dense = set(without)
    wanted = [(number + 1) % step == 0 and number not in dense for number in range(layers)]
    for first, every in ((0, step), first_and_every(wanted)):
        if wanted == has_experts(layers, first, every):
            fields.give("experts.first", first, "mlp_only_layers")
            fields.give("experts.every", every, "decoder_sparse_step")
            return
    fields.refuse("mlp_only_layers", "no experts.first and experts.every mean these blocks")


def first_and_every(wanted: Sequence[bool]) -> tuple[int, int]:
    """Return the only experts.first and experts.every that may mean these blocks; they needn't."""
    sparse = [number for number, each in enumerate(wanted) if each]
    if not sparse:
        return len(wanted), 1
    every = sparse[1] - sparse[0] if len(sparse) > 1 else sparse[0] + 1
    return max(0, sparse[0] + 1 - every), every


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
    blocks = has_experts(config.model.layers, experts.first, experts.every)
    first = (*blocks, True).index(True)
    if not all(blocks[first:]):
        raise ConfigError(
            f"experts.every = {experts.every} can't be written: {config.model.family} has experts in all "
            "blocks after the first ones; use 1"
        )
    return dict(
        first_k_dense_replace=first,
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

"""Rotary positions in config.json: as they are, or with a scaling for longer sequences."""

import math
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.inputs import shown
from mpitrain.plan.declared.hugging_face import ORIGINAL_POSITIONS, ROPE_KEYS, Fields
from mpitrain.plan.declared.resolved import ResolvedAttention, ResolvedConfig

MAX_POSITIONS = "max_position_embeddings"
OF_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}  # where they are absent, or 0
KINDS = {"w": "sliding_attention", "f": "full_attention"}  # by our letters


@dataclass(frozen=True)
class RopeField:
    """Rotary positions, alike in all blocks. theta, default: the class's, as in Fields.rope()."""

    theta: float
    default: dict[str, Any] | None = None

    def read(self, fields: Fields, rope_object: dict[str, Any] | None = None) -> None:
        """Read positions. rope_object: an object that is read instead of the field."""
        rope = fields.rope(self.theta, self.default, rope_object)
        fields.give("attention.theta", float(rope["rope_theta"]), "rope_theta")
        if rope["rope_type"] != "default":
            _give_scaling(fields, fields.positions_field, rope)

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        """Return the fields as 4.x writes them, which every reader understands."""
        rope = _scaling(config)
        theta = config.attention.theta
        if rope["rope_type"] != "default":
            return dict(rope_theta=theta, rope_scaling=rope)
        if self.default:  # absent, it would be that
            return dict(rope_parameters=dict(rope, rope_theta=theta))
        return dict(rope_theta=theta, rope_scaling=None)


def _give_scaling(fields: Fields, name: str, rope: dict[str, Any]) -> None:
    kind = rope["rope_type"]
    if kind != "linear":
        rope = _with_length(fields, name, rope)
    if "factor" not in rope:
        fields.refuse(name, f"rope_type {kind} without factor, which is needed")
    if rope["factor"] < 1:
        fields.refuse(name, f"factor {rope['factor']:g} below 1, which no key has")
    if kind != "dynamic" and rope["factor"] == 1 and rope.get("attention_factor", 1) == 1:
        return  # the same as none
    if kind == "llama3":
        _require_llama3(fields, name, rope)
    if kind == "yarn":
        _give_mscale(fields, name, rope)
        rope = {**rope, **{field: rope.get(field) or value for field, value in OF_YARN.items()}}
        rope.setdefault("truncate", True)
        _require_order(fields, name, rope["beta_slow"], rope["beta_fast"], "beta_fast")
    for field, key in _keys_of(kind).items():
        value = rope[field] if field in (ORIGINAL_POSITIONS, "truncate") else float(rope[field])
        of = name if field == ORIGINAL_POSITIONS else f"{name}.{field}"
        fields.give(f"attention.{key}", value, of)


def _keys_of(kind: str) -> dict[str, str]:
    """Return the fields of a rope_type that have a key each, and these."""
    return {field: key for field, key in ROPE_KEYS[kind].items() if key}


def _with_length(fields: Fields, name: str, rope: dict[str, Any]) -> dict[str, Any]:
    """Return a scaling with the length that was trained with: the longest, unless another is there.

    transformers has the longest begin dynamic scaling, whatever else is there. Where YaRN's factor
    is absent, it is the longest sequence over that length.
    """
    kind = rope["rope_type"]
    most = fields.take(MAX_POSITIONS, None)
    length = most if kind == "dynamic" else rope.get(ORIGINAL_POSITIONS, most)
    if length is None:
        needed = MAX_POSITIONS if kind == "dynamic" else ORIGINAL_POSITIONS
        fields.refuse(name, f"rope_type {kind} without {needed}, which is needed")
    for where, value in ((name, length), (MAX_POSITIONS, most)):
        if value is not None and not _is_length(value):
            fields.refuse(where, f"needed a whole number of positions, found {shown(value)}")
    rope = {**rope, ORIGINAL_POSITIONS: int(length)}
    if kind == "yarn" and most is not None:
        rope.setdefault("factor", most / length)
    return rope


def _is_length(value: Any) -> bool:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return whole and not isinstance(value, bool) and 1 <= value < 2**31


def _require_llama3(fields: Fields, name: str, rope: dict[str, Any]) -> None:
    for key in ("low_freq_factor", "high_freq_factor"):
        if key not in rope:
            fields.refuse(name, f"rope_type llama3 without {key}, which is needed")
    _require_order(fields, name, rope["low_freq_factor"], rope["high_freq_factor"], "high_freq_factor")


def _require_order(fields: Fields, name: str, low: float, high: float, of_high: str) -> None:
    """Refuse a scaling without pairs between those that it slows and those that it leaves."""
    if low >= high:
        fields.refuse(name, f"{of_high} is {high:g}, needed above the other end, {low:g}")


def _give_mscale(fields: Fields, name: str, rope: dict[str, Any]) -> None:
    factor = float(rope["factor"])
    magnitude = rope.get("attention_factor")
    both = rope.get("mscale"), rope.get("mscale_all_dim")
    if magnitude is None and all(both):
        magnitude = _magnitude(factor, both[0]) / _magnitude(factor, both[1])
    if magnitude is None:
        return
    if magnitude < 1 or factor == 1:
        fields.refuse(name, f"attention_factor {magnitude:g} with factor {factor:g}, which no key has")
    fields.give("attention.yarn_mscale", (magnitude - 1) / (0.1 * math.log(factor)), name)


def _magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _scaling(config: ResolvedConfig) -> dict[str, Any]:
    attention = config.attention
    kind = _kind(attention)
    scaling = {field: getattr(attention, key) for field, key in _keys_of(kind).items()}
    if kind == "dynamic":
        del scaling[ORIGINAL_POSITIONS]  # that is max_position_embeddings there
    if kind == "yarn" and attention.yarn_mscale != 1:
        scaling["attention_factor"] = _magnitude(attention.yarn_factor, attention.yarn_mscale)
    return dict(rope_type=kind, **scaling)


def _kind(attention: ResolvedAttention) -> str:
    if (attention.linear_factor or 1) > 1:
        return "linear"
    if attention.dynamic_length:
        return "dynamic"
    if (attention.llama3_factor or 1) > 1:
        return "llama3"
    return "default" if (attention.yarn_factor or 1) == 1 else "yarn"


@dataclass(frozen=True)
class RopeByKind:
    """Rotary positions, of which blocks with a window have a theta of their own, and no scaling.

    After Windows. theta, window_theta: the class's. of_window: 4.x's field of the latter; without one
    4.x has one theta for all blocks, and 5.x the class's for those with a window: that is refused.
    """

    theta: float
    window_theta: float
    of_window: str = ""

    def read(self, fields: Fields) -> None:
        full, own = _objects_by_kind(fields)
        RopeField(self.theta).read(fields, full)
        name = self.of_window
        local = fields.number(name, self.window_theta) if name else self.window_theta
        top = fields.tree.get("rope_theta")
        windowed = bool(fields.keys["attention.window"])
        if not name and top not in (None, self.theta) and "rope_theta" not in own and windowed:
            fields.refuse(
                "rope_theta",
                "transformers 5 has it for blocks without a window alone, 4 for all; give rope_parameters "
                f"instead, with rope_theta in each of {KINDS['f']} and {KINDS['w']}",
            )
        own = fields.rope(self.theta, rope_object={"rope_theta": local, **own})
        if not windowed:
            return
        local = own["rope_theta"]
        if own["rope_type"] != "default":
            if own != fields.rope(self.theta, rope_object=full):
                fields.refuse("rope_parameters", "windows scale positions otherwise, which no key has")
            local = 0
        fields.give("attention.window_theta", float(local), name or "rope_theta")

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        """Raises ConfigError for what transformers passes over."""
        own = config.attention
        if own.yarn_factor > 1 and not own.yarn_rounded:
            raise ConfigError(
                "attention.yarn_rounded = false can't be written: transformers passes over it where blocks "
                "with a window have their own positions; use true"
            )
        of_all = dict(_scaling(config), rope_theta=own.theta)
        local = dict(rope_type="default", rope_theta=own.window_theta) if own.window_theta else of_all
        return dict(rope_parameters={KINDS["f"]: of_all, KINDS["w"]: local})


def _objects_by_kind(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the objects of blocks without and with a window, as transformers puts them together."""
    both = fields.rope_objects()
    ropes = both["rope_parameters"] or {}
    if ropes.keys() - set(KINDS.values()) or not all(
        isinstance(rope, dict | None) for rope in ropes.values()
    ):
        fields.refuse("rope_parameters", f"needed an object for {KINDS['f']}, and one for {KINDS['w']}")
    full, own = (dict(ropes.get(KINDS[letter]) or {}) for letter in "fw")
    scaling = both["rope_scaling"] or {}
    if "rope_type" not in scaling and scaling.get("type", "default") != "default":
        fields.refuse("rope_scaling", "transformers reads rope_type, not type, in this family; rename it")
    full |= scaling
    for rope in (full, own):
        if rope.get("truncate") is False:
            fields.refuse(
                fields.positions_field, "truncate false, which transformers passes over in this family"
            )
    return full, own

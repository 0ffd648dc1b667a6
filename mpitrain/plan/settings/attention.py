"""Attention of a model: what the configuration left open, and what would do nothing.

Integers and names only.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from mpitrain.config import NEUTRAL, AttentionTable
from mpitrain.errors import ConfigError
from mpitrain.plan.declared.family import ModelFamily
from mpitrain.plan.declared.resolved import ResolvedAttention, ResolvedConfig, ResolvedModel

# of rotary positions, for sequences longer than were trained with: the key that turns each on. Theta
# grows with a dynamic factor of 1, too
SCALINGS = {
    "yarn": "yarn_factor",
    "llama3": "llama3_factor",
    "linear": "linear_factor",
    "dynamic": "dynamic_length",
}


def head_width(config: ResolvedConfig) -> int:
    """Return the width of a head's queries and keys, with latent attention without their positions' part."""
    return config.attention.head_width or config.model.width // config.model.heads


def with_heads(model: ResolvedModel, family: ModelFamily, kv_heads: int | None) -> ResolvedModel:
    """Return a model whose heads have keys and values as its family does. kv_heads: as configured."""
    if family.grouped:
        return model
    if kv_heads not in (None, model.heads):
        raise ConfigError(
            f"model.kv_heads = {kv_heads} does nothing with model.family = {json.dumps(model.family)}, which "
            f"has keys and values for each of model.heads = {model.heads}; leave it out"
        )
    return msgspec.structs.replace(model, kv_heads=model.heads)


def resolve_attention(
    table: AttentionTable, model: ResolvedModel, family: ModelFamily, preset: Mapping[str, Any]
) -> ResolvedAttention:
    """Fill in what the table `attention` left open. Raises ConfigError for what can't be, or does nothing."""
    known = family.attention
    given = {key: value for key, value in msgspec.structs.asdict(table).items() if value is not None}
    family.refuse_unused(model.family, "attention", given, NEUTRAL["attention"])
    keys = {**known, **{key: value for key, value in preset.items() if key in known}, **given}
    scalings = [name for name, key in SCALINGS.items() if key in known]
    for name in scalings:
        keys |= _scaling(name, keys, given, known)
    _refuse_two_scalings([name for name in scalings if _is_on(name, keys)], keys)
    keys |= _without_window(keys, given, known)
    keys |= family.heads(model, keys)
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"model.heads = {model.heads} is not a multiple of model.kv_heads = {model.kv_heads}"
        )
    return ResolvedAttention(**NEUTRAL["attention"] | keys)


def _scaling(
    name: str, keys: dict[str, Any], given: dict[str, Any], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of a scaling of rotary positions that have no effect: all of them if it is off.

    Raises ConfigError for one of them that is given then, and for a factor without its length.
    """
    turned_on_by, length = SCALINGS[name], f"{name}_length"
    others = [key for key in known if key.startswith(f"{name}_") and key != turned_on_by]
    without = {key: known[key] for key in others}
    if _is_on(name, keys):
        if length in without and not keys[length]:
            what = f"attention.{turned_on_by} = {keys[turned_on_by]} without attention.{length}"
            raise ConfigError(f"{what}; set it to the positions that were trained with before")
        return {}
    for key, value in without.items():
        if given.get(key, value) != value:
            off = f"attention.{turned_on_by} = {_off(turned_on_by)}"
            alone = f"does nothing with {off}; leave it out, or raise attention.{turned_on_by}"
            raise ConfigError(f"attention.{key} = {given[key]} {alone}")
    return without


def _off(key: str) -> int:
    """Return the value of a key with which its scaling is off: a factor of 1, no length."""
    return 1 if key.endswith("_factor") else 0


def _is_on(name: str, keys: Mapping[str, Any]) -> bool:
    return bool(keys[SCALINGS[name]] > _off(SCALINGS[name]))


def _refuse_two_scalings(used: list[str], resolved: dict[str, Any]) -> None:
    if len(used) > 1:
        keys = [SCALINGS[name] for name in used]
        several = " with ".join(f"attention.{key} = {resolved[key]}" for key in keys)
        raise ConfigError(f"{several}: positions are scaled in one way; leave out all but one of these")
    for name, low, high in (("llama3", "llama3_low", "llama3_high"), ("yarn", "yarn_slow", "yarn_fast")):
        if name in used and resolved.get(low, 1) >= resolved.get(high, 32):
            raise ConfigError(
                f"attention.{low} = {resolved[low]} is not below attention.{high} = {resolved[high]}; "
                "pairs are interpolated between them, raise the second"
            )


def _without_window(
    resolved: dict[str, Any], given: dict[str, Any], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of windows that have no effect, where there is no window, as the family has them.

    Raises ConfigError for one of them that is given then, and for a theta that can't be.
    """
    if resolved.get("window"):
        theta = resolved.get("window_theta") or 0
        if 0 < theta <= 1:
            raise ConfigError(
                f"attention.window_theta = {theta}: needed more than 1, or 0 for attention.theta"
            )
        return {}
    without = {key: known[key] for key in ("window_blocks", "window_theta") if key in known}
    for key, value in without.items():
        if given.get(key, value) != value:
            raise ConfigError(
                f"attention.{key} = {json.dumps(given[key])} does nothing with attention.window = "
                "0; leave it out, or set attention.window"
            )
    return without

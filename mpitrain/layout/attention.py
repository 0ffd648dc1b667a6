"""Attention of a model: what the configuration left open, and what would do nothing.

Integers and names only.
"""

import json
from typing import Any

import msgspec

from mpitrain.config import ATTENTION, FIRST_FAMILY, NEUTRAL, AttentionTable, Config, Model
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown

# of rotary positions, for sequences longer than were trained with; their keys without effect
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": dict(yarn_length=0, yarn_mscale=1.0),
    "llama3": dict(llama3_length=0, llama3_low=1.0, llama3_high=4.0),
}


def head_width(config: Config) -> int:
    """Return the width of a head's queries and keys in a resolved configuration.

    With latent attention, of their part without positions.
    """
    return config.attention.head_width or config.model.width // config.model.heads


def keys_of(model: Model) -> dict[str, Any]:
    """Return the keys that the attention of a model's family has, and their values where none is given."""
    return ATTENTION.get(model.family, ATTENTION[FIRST_FAMILY])


def latent(model: Model) -> bool:
    """Tell whether keys and values are made of a latent vector (layers/latent_attention.py)."""
    return "kv_rank" in keys_of(model)


def with_heads(model: Model, kv_heads: int | None) -> Model:
    """Return a model whose heads have keys and values as its family does.

    kv_heads: as configured, None if that is open.
    """
    if not latent(model):
        return model
    if kv_heads not in (None, model.heads):
        raise ConfigError(
            f"model.kv_heads = {kv_heads} does nothing with model.family = {json.dumps(model.family)}, whose "
            f"latent attention makes keys and values for all model.heads = {model.heads}; leave it out"
        )
    return msgspec.structs.replace(model, kv_heads=model.heads)


def resolve_attention(config: Config, model: Model, preset: dict) -> AttentionTable:
    """Fill in what the table `attention` left open.

    Raises ConfigError for what would do nothing, and for what can't be.
    """
    known = keys_of(model)
    values = {key: getattr(config.attention, key) for key in AttentionTable.__struct_fields__}
    given = {key: value for key, value in values.items() if value is not None}
    for key, value in given.items():
        if key not in known and value != NEUTRAL["attention"].get(key):
            having = ", ".join(family for family, keys in ATTENTION.items() if key in keys)
            none = (
                f"does nothing with model.family = {shown(json.dumps(model.family))}; leave it out, or use "
                f"{having}"
            )
            raise ConfigError(f"attention.{key} = {shown(json.dumps(value))} {none}")
    found = {**known, **{key: value for key, value in preset.items() if key in known}, **given}
    scalings = [name for name in SCALINGS if f"{name}_factor" in known]
    for name in scalings:
        found |= _scaling(name, found, given)
    _refuse_two_scalings([name for name in scalings if found[f"{name}_factor"] > 1], found)
    width = found["head_width"] or _divided(model)
    if latent(model):
        derived = _as_wide_as(width)
        found |= {"head_width": width} | {key: size for key, size in derived.items() if found[key] is None}
        _refuse_empty(found)
        _refuse_odd("attention.rotary_width", found["rotary_width"])
        _refuse_wide_values(found)
    else:
        _refuse_odd("attention.head_width" if found["head_width"] else "model.width / model.heads", width)
    if model.heads % model.kv_heads:
        raise ConfigError(
            f"model.heads = {model.heads} is not a multiple of model.kv_heads = {model.kv_heads}"
        )
    return AttentionTable(**NEUTRAL["attention"] | found)


def _divided(model: Model) -> int:
    if model.width % model.heads:
        raise ConfigError(f"model.width = {model.width} is not a multiple of model.heads = {model.heads}")
    return model.width // model.heads


def _scaling(name: str, found: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a scaling of rotary positions that have no effect: all of them without a factor.

    Raises ConfigError for one of them that is given then, and for a factor without the length that
    it is a multiple of.
    """
    factor = found[f"{name}_factor"]
    length = f"{name}_length"
    if factor > 1:
        if not found[length]:
            what = f"attention.{name}_factor = {factor} without attention.{length}"
            raise ConfigError(f"{what}; set it to the positions that were trained with before")
        return {}
    without = SCALINGS[name]
    for key, value in without.items():
        if given.get(key, value) != value:
            alone = f"does nothing with attention.{name}_factor = 1; leave it out, or raise the factor"
            raise ConfigError(f"attention.{key} = {given[key]} {alone}")
    return without


def _refuse_two_scalings(used: list[str], found: dict[str, Any]) -> None:
    if len(used) > 1:
        factors = " with ".join(f"attention.{name}_factor = {found[f'{name}_factor']}" for name in used)
        raise ConfigError(f"{factors}: positions are scaled in one way; set one of the factors to 1")
    if "llama3" in used and found["llama3_low"] >= found["llama3_high"]:
        low, high = (f"attention.llama3_{end} = {found[f'llama3_{end}']}" for end in ("low", "high"))
        raise ConfigError(f"{low} is not below {high}; pairs are interpolated between them, raise the second")


def _as_wide_as(width: int) -> dict[str, int]:
    """Return the sizes of latent attention, by the width of a head (DeepSeek-V2, arXiv:2405.04434,
    section 3.1.2; V3's are the same).
    """
    return {
        "q_rank": 12 * width,
        "kv_rank": 4 * width,
        "rotary_width": max(2, width // 4 * 2),
        "value_width": width,
    }


def _refuse_empty(found: dict[str, Any]) -> None:
    """Raise ConfigError for a part of latent attention that has no features. q_rank may be 0.

    Queries are made of the layer's input.
    """
    for key in ("kv_rank", "rotary_width", "value_width"):
        if not found[key]:
            raise ConfigError(
                f"attention.{key} = 0: latent attention needs at least 1; leave it out to derive it from the "
                "head's width"
            )


def _refuse_odd(key: str, width: int) -> None:
    if width % 2:
        raise ConfigError(f"{key} = {width}: rotary embeddings need an even width of a head")


def _refuse_wide_values(found: dict[str, Any]) -> None:
    """Raise ConfigError where values would be wider than what attention's kernels are given."""
    together = found["head_width"] + found["rotary_width"]
    if found["value_width"] > together:
        parts = (
            f"attention.head_width + attention.rotary_width = {found['head_width']} + {found['rotary_width']}"
        )
        raise ConfigError(
            f"attention.value_width = {found['value_width']} is more than {parts}, the width of queries and "
            "keys; lower it"
        )

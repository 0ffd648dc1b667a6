"""Attention of a model: what the configuration left open, and what would do nothing. Integers and names only."""

import json
from typing import Any

import msgspec

from mpitrain.config import ATTENTION, FIRST_FAMILY, Attention, Config, Model
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown


def head_width(config: Config) -> int:
    """Return the width of a head's queries and keys in a resolved configuration; with latent attention, of their part without positions."""
    return config.attention.head_width or config.model.width // config.model.heads


def keys_of(model: Model) -> dict[str, Any]:
    """Return the keys that the attention of a model's family has, and their values where none is given."""
    return ATTENTION.get(model.family, ATTENTION[FIRST_FAMILY])


def latent(model: Model) -> bool:
    """Tell whether keys and values are made of a latent vector (layers/latent_attention.py)."""
    return "kv_rank" in keys_of(model)


def with_heads(model: Model, kv_heads: int) -> Model:
    """Return a model whose heads have keys and values as its family does. kv_heads: as configured, 0 if that is open."""
    if not latent(model):
        return model
    if kv_heads not in (0, model.heads):
        raise ConfigError(
            f"model.kv_heads = {kv_heads} does nothing with model.family = {json.dumps(model.family)}, whose latent attention makes keys "
            f"and values for all model.heads = {model.heads}; leave it out"
        )
    return msgspec.structs.replace(model, kv_heads=model.heads)


def resolve_attention(config: Config, model: Model, preset: dict) -> Attention:
    """Fill in what the table `attention` left open. Raises ConfigError for what would do nothing, and for what can't be."""
    known, absent = keys_of(model), Attention()
    values = {key: getattr(config.attention, key) for key in Attention.__struct_fields__}
    given = {key: value for key, value in values.items() if value != getattr(absent, key)}
    for key, value in given.items():
        if key not in known:
            having = ", ".join(family for family, keys in ATTENTION.items() if key in keys)
            none = f"does nothing with model.family = {shown(json.dumps(model.family))}; leave it out, or use {having}"
            raise ConfigError(f"attention.{key} = {shown(json.dumps(value))} {none}")
    found = {**known, **{key: value for key, value in preset.items() if key in known}, **given}
    found |= _yarn(found, given)
    width = found["head_width"] or _divided(model)
    if latent(model):
        derived = _as_wide_as(width)
        found |= {"head_width": width} | {key: size for key, size in derived.items() if found[key] == getattr(absent, key)}
        _refuse_odd("attention.rotary_width", found["rotary_width"])
        _refuse_wide_values(found)
    else:
        _refuse_odd("attention.head_width" if found["head_width"] else "model.width / model.heads", width)
    if model.heads % model.kv_heads:
        raise ConfigError(f"model.heads = {model.heads} is not a multiple of model.kv_heads = {model.kv_heads}")
    return Attention(**found)


def _divided(model: Model) -> int:
    if model.width % model.heads:
        raise ConfigError(f"model.width = {model.width} is not a multiple of model.heads = {model.heads}")
    return model.width // model.heads


def _yarn(found: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of YaRN: none of them without a factor."""
    if found["yarn_factor"] > 1:
        if not found["yarn_length"]:
            factor = f"attention.yarn_factor = {found['yarn_factor']}"
            raise ConfigError(f"{factor} without attention.yarn_length; set it to the positions that were trained with before")
        return {}
    without = {"yarn_length": 0, "yarn_mscale": 1.0}
    for key, value in without.items():
        if given.get(key, value) != value:
            alone = "does nothing with attention.yarn_factor = 1; leave it out, or raise the factor"
            raise ConfigError(f"attention.{key} = {given[key]} {alone}")
    return without


def _as_wide_as(width: int) -> dict[str, int]:
    """Return the sizes of latent attention, by the width of a head (DeepSeek-V2, arXiv:2405.04434, section 3.1.2; V3's are the same)."""
    return {"q_rank": 12 * width, "kv_rank": 4 * width, "rotary_width": max(2, width // 4 * 2), "value_width": width}


def _refuse_odd(key: str, width: int) -> None:
    if width % 2:
        raise ConfigError(f"{key} = {width}: rotary embeddings need an even width of a head")


def _refuse_wide_values(found: dict[str, Any]) -> None:
    """Raise ConfigError where values would be wider than what attention's kernels are given."""
    together = found["head_width"] + found["rotary_width"]
    if found["value_width"] > together:
        parts = f"attention.head_width + attention.rotary_width = {found['head_width']} + {found['rotary_width']}"
        raise ConfigError(f"attention.value_width = {found['value_width']} is more than {parts}, the width of queries and keys; lower it")

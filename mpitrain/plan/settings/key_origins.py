"""Where the keys that resolve() filled in come from: the preset, the family, or the other keys."""

from typing import Any

from mpitrain.config import LoadedConfig, flatten
from mpitrain.origins import DEFAULT, DERIVED, FAMILY, PRESET, KeyOrigin
from mpitrain.plan.declared.family import family_of, presets
from mpitrain.plan.declared.resolved import ResolvedConfig


def with_resolved(given: LoadedConfig, resolved: ResolvedConfig) -> LoadedConfig:
    """Return a resolved configuration with the origins of its keys.

    A key that was given as "auto", or as what times are read from, has its value from the others.
    """
    before = flatten(given.config)
    changed = {key: value for key, value in flatten(resolved).items() if value != before[key]}
    origins = given.origins
    for key, value in changed.items():
        if origins.of(key).kind == DEFAULT or before[key] == "auto" or key == "pipeline.trace":
            origins = origins.updated([key], _origin(key, value, resolved))
    return LoadedConfig(resolved, origins)


def _origin(key: str, value: Any, resolved: ResolvedConfig) -> KeyOrigin:
    name, family = resolved.model.preset, family_of(resolved.model)
    of_preset = presets(resolved.model.family)[name]
    nested = {"attention": of_preset.get("attention", {}), "experts": of_preset.get("experts", {})}
    of_family = {"model": family.model, "attention": family.attention, "experts": family.experts or {}}
    table, _, word = key.partition(".")
    missing = object()
    if nested.get(table, of_preset if table == "model" else {}).get(word, missing) == value:
        return KeyOrigin(PRESET, name)
    if of_family.get(table, {}).get(word, missing) == value:
        return KeyOrigin(FAMILY, resolved.model.family)
    return KeyOrigin(DERIVED)

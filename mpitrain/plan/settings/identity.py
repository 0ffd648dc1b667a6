"""What makes two runs the same computation: a run resumes only if these keys are unchanged."""

from typing import Any

from mpitrain.config import FIRST_FAMILY, NEUTRAL, Config, flatten
from mpitrain.plan.declared.family import FAMILIES
from mpitrain.plugins import is_plugin

# What is where and of what content may change, as do layout, transport and length.
BY_CONTENT = (
    *("data.path", "data.val_path", "data.text_key", "data.tokenizer", "data.tokens", "data.end_of_text"),
    *("data.begin_of_text", "data.order", "data.read", "data.ends", "data.dtype", "data.damaged"),
    *("data.sources", "data.skip", "batch.growth", "batch.lengths"),
)
TABLES = ("model", "attention", "experts", "data", "batch", "precision", "optimizer", "schedule")


def identity(config: Config) -> dict[str, Any]:
    """Return the keys that define the computation: a run may only resume if they are unchanged."""
    values = flatten(config).items()
    value_by_key = {k: value for k, value in values if k == "run.seed" or k.split(".")[0] in TABLES}
    # buffer, dispatch: the same rows, in more rounds or in fewer, by other ways: a matter of the layout,
    # like ep. steps: like run.steps, by which a run is made longer. init: a run resumes from its own
    # checkpoint. BY_CONTENT: data/tokens.json and checkpoints have the digest, checkpoints the order, too
    for key in ("experts.buffer", "experts.dispatch", "schedule.steps", "model.init", *BY_CONTENT):
        del value_by_key[key]
    # likewise: checkpoints have the digest of the routing
    value_by_key["experts.replay"] = bool(value_by_key["experts.replay"])
    value_by_key["model.family"] = value_by_key["model.family"] or FIRST_FAMILY
    neutral = {f"{table}.{key}": value for table, keys in NEUTRAL.items() for key, value in keys.items()}
    # in runs older than the key
    value_by_key |= {key: value for key, value in neutral.items() if value_by_key[key] is None}
    of_family = _keys_of(value_by_key["model.family"])
    return value_by_key | {
        key: value for key, value in of_family.items() if value_by_key[key] == neutral.get(key)
    }


def _keys_of(name: str) -> dict[str, Any]:
    """Return the keys of a family, of its attention and its own of the model; {} of one that isn't there."""
    if not is_plugin(name) and name not in FAMILIES.built_in():
        return {}
    family = FAMILIES.find(name)
    tables = {"attention": family.attention, "model": family.model}
    return {f"{table}.{key}": value for table, keys in tables.items() for key, value in keys.items()}

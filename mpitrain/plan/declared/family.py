"""A family of models: one object, in one file of model/families/ or in a module of the user's own
(plugins.py). Nobody else knows families by name.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.config import Model
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown
from mpitrain.plan.declared.hugging_face import ModelType, Stored
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.declared.resolved import ResolvedConfig, ResolvedModel
from mpitrain.plugins import Catalog

# keys of rotary positions, and their values where none is given: of most families
ROTARY: dict[str, Any] = dict(
    head_width=0, theta=10_000.0, yarn_factor=1.0, yarn_length=0, yarn_mscale=1.0,
    yarn_fast=32.0, yarn_slow=1.0, yarn_rounded=True, linear_factor=1.0,
    dynamic_factor=1.0, dynamic_length=0,
    llama3_factor=1.0, llama3_length=0, llama3_low=1.0, llama3_high=4.0,
)  # fmt: skip
# of windows, where a configuration chooses the blocks that have one
WINDOWS: dict[str, Any] = dict(window=0, window_blocks="w")
# of experts, where all are alike and every block has some
ALL_ALIKE: dict[str, Any] = dict(shared=0, groups=1, groups_active=1, first=0, every=1, z_weight=0.0)
# keys of the table `model` that not all families have
OF_SOME = (
    "eps", "ffn_biased", "gelu", "logit_cap", "positions",
    "embedding_dropout", "attention_dropout", "residual_dropout",
)  # fmt: skip
# of a router that chooses by softmax
OF_SOFTMAX: dict[str, Any] = dict(score="softmax", normalised=True, scale=1.0)


def width_of_head(model: ResolvedModel) -> int:
    """Return the width of a head that no key says. Raises ConfigError if heads don't divide the model's."""
    if model.width % model.heads:
        raise ConfigError(f"model.width = {model.width} is not a multiple of model.heads = {model.heads}")
    return model.width // model.heads


def refuse_odd(key: str, width: int) -> None:
    """Raise ConfigError for features with positions that aren't pairs."""
    if width % 2:
        raise ConfigError(f"{key} = {width}: rotary embeddings need an even width of a head")


def plain_heads(model: ResolvedModel, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of heads that are derived from others: none. Raises ConfigError for odd ones.

    keys: those of the table `attention`, with their values so far.
    """
    own = keys["head_width"]
    named = "attention.head_width" if own else "model.width / model.heads"
    width = own or width_of_head(model)
    turning = keys.get("rotary_width") or width
    if turning > width:
        raise ConfigError(
            f"attention.rotary_width = {turning} is more than {named} = {width}, the width of a "
            "head; lower it"
        )
    refuse_odd(named if turning == width else "attention.rotary_width", turning)
    return {}


@dataclass(frozen=True)
class ModelFamily:
    """A family of models. Its compute side is imported by its layers when they build items: no torch.

    name: value of model.family, of a family in model/families/.
    layers: makes the layers of a resolved configuration's model.
    attention: its keys of the table `attention`, and their values where none is given.
    experts: its keys of the table `experts`, likewise; None: it has no experts.
    model: its keys of the table `model` that not all families have (OF_SOME), likewise.
    heads: derives sizes of heads from others, and refuses what can't be, as plain_heads() does.
    grouped: heads can share keys and values, so that model.kv_heads is a key of it.
    presets: published sizes by name: keys of the table `model`, and tables of parts of it.
    weight_names: for each other format, its name of each weight, by ours; `{block}` and `{expert}`
    are numbers (model/families/names.py). A weight that lies there otherwise than here has a Stored
    (plan/declared/hugging_face.py). Empty: the family can't be read or written in it.
    model_types: how config.json says this family in Hugging Face folders; the first is written.
    """

    name: str
    layers: Callable[[ResolvedConfig], ModelLayers]
    attention: Mapping[str, Any]
    experts: Mapping[str, Any] | None = None
    heads: Callable[[ResolvedModel, Mapping[str, Any]], dict[str, Any]] = plain_heads
    grouped: bool = True
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    weight_names: Mapping[str, Mapping[str, str | Stored]] = field(default_factory=dict)
    model_types: tuple[ModelType, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)

    def uses(self, table: str, key: str) -> bool:
        """Return whether a key does something: of `attention` one of the family's, of `experts` any if it has
        some, of `model` one that all families have, or one of its own.
        """
        if table == "model":
            return key not in OF_SOME or key in self.model
        return key in self.attention if table == "attention" else self.experts is not None

    def refuse_unused(
        self, named: str, table: str, given: Mapping[str, Any], neutral: Mapping[str, Any]
    ) -> None:
        """Raise ConfigError for the first key of a table that is given and that this family doesn't use.

        named: the value of model.family.
        neutral: values that say nothing.
        """
        none = ", which has no experts" if table == "experts" else ""
        for key, value in given.items():
            if not self.uses(table, key) and value != neutral.get(key):
                others = [name for name, family in FAMILIES.built_in().items() if family.uses(table, key)]
                raise ConfigError(
                    f"{table}.{key} = {shown(json.dumps(value))} does nothing with model.family = "
                    f"{shown(json.dumps(named))}{none}; leave it out, or use {', '.join(others)}"
                )


FAMILIES = Catalog(
    "model.family", "mpitrain.model.families", ModelFamily, "a ModelFamily (mpitrain/plan/declared/family.py)"
)


def family_of(model: Model) -> ModelFamily:
    """Return the family of a resolved configuration's model. Raises ConfigError if there is none."""
    return FAMILIES.find(model.family)


def with_experts() -> list[str]:
    """Return the names of families that have experts."""
    return [name for name, family in FAMILIES.built_in().items() if family.experts is not None]


def presets(named: str = "") -> dict[str, dict[str, Any]]:
    """Return all published sizes by name, each with its family; also those of a plug-in that is named."""
    families = dict(FAMILIES.built_in())
    if named not in families and named:
        families[named] = FAMILIES.find(named)
    return {
        preset: {"family": name, **sizes}
        for name, family in families.items()
        for preset, sizes in family.presets.items()
    }

"""Which tensors of a folder the weights of a model are, and whether all are there."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from mpitrain.checkpoint.boxes import Box, whole
from mpitrain.errors import WeightsError, counted
from mpitrain.inputs import listed, shown
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.family import family_of
from mpitrain.plan.declared.hugging_face import FORMAT, Stored, as_stored
from mpitrain.plan.declared.parameters import Spec
from mpitrain.plan.plan import Plan
from mpitrain.weights.bits import DTYPES
from mpitrain.weights.folder import ModelFolder
from mpitrain.weights.keys import ModelKeys

HEAD = "head.weight"
EMBEDDING = "embedding.weight"
BIAS = "bias"  # of Spec.group: biases of routers, which only experts.balance = "bias" has
FURTHER = "mtp."  # weights for further tokens, which are of training alone
# what older versions of transformers stored with the weights
IGNORED = (r".*\.rotary_emb\.inv_freq", r".*\.masked_bias")


@dataclass(frozen=True)
class Weight:
    """A weight of ours, whole, and the tensors of a folder that it lies in."""

    spec: Spec
    stored: Stored
    rows: int  # of it that the tensors have; the others, of a padded vocabulary, they lack
    tensors: tuple[str, ...]  # names; one of each expert, if by_expert
    by_expert: bool
    shape: tuple[int, ...]  # of each tensor
    ours: tuple[int, ...]  # of what one tensor has of the weight

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def box(self) -> Box:
        """What the tensors have of it."""
        return whole((self.rows, *self.spec.shape[1:]))


def weights_of(plan: Plan, vocab: int) -> list[Weight]:
    """Return a model's weights in order, with their tensors. vocab: rows. Raises WeightsError."""
    names = _names_of(plan)
    if not names:
        family = shown(plan.config.model.family)
        raise WeightsError(f"model.family = {family} has no names in a Hugging Face folder")
    specs = [spec for spec in plan.parameters() if spec.group != "load"]
    return [_weight(plan, spec, names, vocab) for spec in specs if not spec.name.startswith(FURTHER)]


def unused_biases(plan: Plan) -> list[Spec]:
    """Return the biases of routers that the model has with experts.balance = "bias" alone."""
    experts = plan.config.experts
    if not experts.count or experts.balance == BIAS:
        return []
    biased = msgspec.structs.replace(experts, balance=BIAS)
    specs = plan_of(msgspec.structs.replace(plan.config, experts=biased)).parameters()
    return [spec for spec in specs if spec.group == BIAS and not spec.name.startswith(FURTHER)]


def zeros_of(plan: Plan, vocab: int) -> list[Weight]:
    """Return what folders of the family have besides the weights of a model, as zeros."""
    names = _names_of(plan)
    specs = unused_biases(plan) if "blocks.{block}.ffn.router.bias" in names else []
    return [_weight(plan, spec, names, vocab) for spec in specs]


def _names_of(plan: Plan) -> Mapping[str, str | Stored]:
    return family_of(plan.config.model).weight_names.get(FORMAT, {})


def _weight(plan: Plan, spec: Spec, names: Mapping[str, str | Stored], vocab: int) -> Weight:
    match = re.fullmatch(r"blocks\.([0-9]+)\.(.*)", spec.name)
    pattern = f"blocks.{{block}}.{match[2]}" if match else spec.name
    if pattern not in names:
        family = f"model.family = {shown(plan.config.model.family)}: no such model has this weight"
        raise WeightsError(f"{shown(spec.name)} has no name in a Hugging Face folder of {family}")
    stored = as_stored(names[pattern])
    name = stored.name_for(plan.config)
    if match:
        name = name.replace("{block}", match[1])
    by_expert = "{expert}" in name
    # a table of positions isn't divided
    of_tokens = spec.group == "table" and spec.divided is not None
    rows = min(vocab, spec.shape[0]) if of_tokens else spec.shape[0]
    ours = spec.shape[1:] if by_expert else (rows, *spec.shape[1:])
    count = spec.shape[0] if by_expert else 1
    tensors = tuple(name.replace("{expert}", str(expert)) for expert in range(count))
    return Weight(spec, stored, rows, tensors, by_expert, tuple(stored.shape(ours, plan.config)), ours)


@dataclass(frozen=True)
class Matched:
    """The weights of a model that a folder holds."""

    weights: tuple[Weight, ...]  # all that are there, with the names that the folder has
    zeros: tuple[Weight, ...]  # what the folder has besides, which has to be 0: see zeros_of()
    absent: tuple[Weight, ...]  # biases of routers, which are 0 where none is there
    head: str  # of a tied model, if it lies there besides: its numbers are the embedding's
    ignored: tuple[str, ...]  # names of tensors that are not part of the model


def match(folder: ModelFolder, plan: Plan, keys: ModelKeys) -> Matched:
    """Return where the folder has which weight. Raises WeightsError unless it has just these."""
    weights, zeros = weights_of(plan, keys.vocab), zeros_of(plan, keys.vocab)
    there = folder.names
    prefix = keys.kind.prefix
    if prefix and not any(name.startswith(prefix) for name in there):
        weights, zeros = ([_without(weight, prefix) for weight in some] for some in (weights, zeros))
    absent = _absent_biases(weights, there)
    weights = [weight for weight in weights if weight not in absent]
    zeros = [weight for weight in zeros if weight.tensors[0] in there]
    _require_all(folder, [*weights, *zeros])
    rest = there.keys() - tensors_of((*weights, *zeros)).keys()
    head = _head_of(plan) if plan.config.model.tied else ""
    head = head if head in rest else ""
    if head:
        _require_dtype(folder, head)
    empty = {name for name in rest if 0 in folder.entry(name).shape}  # shared experts of a model without
    ignored = _ignored(rest - {head}, plan, keys) | empty
    if unused := sorted(rest - {head} - ignored):
        raise WeightsError(
            f"{shown(folder.path)}: {counted(len(unused), 'tensors', ',')} that no weight of model.family = "
            f"{plan.config.model.family} is: {listed(unused, 4)}; it is another model than config.json says"
        )
    return Matched(tuple(weights), tuple(zeros), tuple(absent), head, tuple(sorted(ignored)))


def _absent_biases(weights: Sequence[Weight], there: Mapping[str, str]) -> list[Weight]:
    biases = [weight for weight in weights if weight.spec.group == BIAS]
    return [] if any(weight.tensors[0] in there for weight in biases) else biases


def _head_of(plan: Plan) -> str:
    names = _names_of(plan)
    return as_stored(names[HEAD]).name_for(plan.config) if HEAD in names else ""


def _require_all(folder: ModelFolder, weights: Sequence[Weight]) -> None:
    there = folder.names
    if lost := [name for weight in weights for name in weight.tensors if name not in there]:
        are = "are" if len(lost) > 1 else "is"
        what = f"{counted(len(lost), 'tensors', ',')} of the model {are} missing: {listed(lost, 4)}"
        raise WeightsError(f"{shown(folder.path)}: {what}; get the whole folder")
    for weight in weights:
        for name in weight.tensors:
            shape = folder.entry(name).shape
            if shape != weight.shape:
                needed = f"needed {list(weight.shape)} by config.json; one of them is another model's"
                raise WeightsError(f"{_where(folder, name)} is {list(shape)}, {needed}")
            _require_dtype(folder, name)


def _without(weight: Weight, prefix: str) -> Weight:
    return replace(weight, tensors=tuple(name.removeprefix(prefix) for name in weight.tensors))


def _require_dtype(folder: ModelFolder, name: str) -> None:
    if (code := folder.entry(name).code) not in DTYPES:
        needed = f"needed {', '.join(DTYPES)}; have the model written in one of these"
        raise WeightsError(f"{_where(folder, name)} is {code}, which isn't read: {needed}")


def _where(folder: ModelFolder, name: str) -> str:
    return f"{folder.where(folder.names[name])}: {shown(name)}"


def _ignored(names: Iterable[str], plan: Plan, keys: ModelKeys) -> set[str]:
    """Return the names of tensors that are not part of the model, by what the family says of them."""
    patterns = [*IGNORED, *keys.kind.ignored]
    ignored = {name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns)}
    stored = _names_of(plan).values()
    fronts = {as_stored(form).name_for(plan.config).partition("{block}")[0] for form in stored}
    first = plan.config.model.layers
    blocks = range(first, first + min(keys.further, 16))
    prefixes = tuple(f"{front}{block}." for front in fronts for block in blocks)
    return ignored | {name for name in names if name.startswith(prefixes)}


def tensors_of(weights: Sequence[Weight]) -> dict[str, list[tuple[Weight, int]]]:
    """Return what is in each tensor, in order: weights, or experts of them."""
    tensors: dict[str, list[tuple[Weight, int]]] = {}
    for weight in weights:
        for expert, name in enumerate(weight.tensors):
            tensors.setdefault(name, []).append((weight, expert))
    return tensors

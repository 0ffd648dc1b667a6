"""config.json of a Hugging Face folder as keys of ours, and back, as its family says."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from mpitrain import config as settings
from mpitrain.config import Batch, Config, LoadedConfig, Memory, Numerics, OptimizerTable
from mpitrain.errors import ConfigError, MpitrainError, WeightsError
from mpitrain.inputs import listed, shown
from mpitrain.model.families.catalog import plan_of
from mpitrain.model.families.expert_fields import first_and_every
from mpitrain.model.families.sparse import has_experts
from mpitrain.origins import FOLDER, NONE, KeyOrigin
from mpitrain.plan.declared.family import FAMILIES, family_of
from mpitrain.plan.declared.hugging_face import Fields, ModelType
from mpitrain.plan.plan import Plan
from mpitrain.plan.settings.attention import head_width
from mpitrain.plan.settings.resolve import on_one_rank, resolve
from mpitrain.weights.bits import TORCH
from mpitrain.weights.folder import CONFIG, ModelFolder

# of the table `experts`: how they are trained and where, which no config.json says
OF_TRAINING = frozenset(
    ["balance", "balance_weight", "bias_rate", "z_weight", "replay", "capacity", "buffer", "dispatch", "wire"]
)
# keys that a config.json's model may be trained with another value of
OPEN = (
    *("attention.theta", "attention.window", "model.vocab", "model.vocab_multiple"),
    *("model.embedding_dropout", "model.attention_dropout", "model.residual_dropout"),
)
OPEN_PREFIXES = ("attention.yarn_", "attention.llama3_")
TABLES = ("model", "attention", "experts")
LEAST_TENSORS = 4  # of a block, in any family: a norm, two products of attention, one of the ffn
# blocks after the last one that predict further tokens, by both names of 5.x
FURTHER_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers")
DTYPE_FIELDS = ("dtype", "torch_dtype")  # of 5.x and 4.x


class ModelKeys(NamedTuple):
    """What a config.json says. where: its path. further: blocks for further tokens alone."""

    kind: ModelType
    keys: dict[str, Any]  # by our names, model.width
    where: str
    lines: list[str]  # of the report
    further: int

    @property
    def vocab(self) -> int:
        """Tokens that the folder has a row for."""
        return self.keys["model.vocab"]


def keys_of(folder: ModelFolder) -> ModelKeys:
    """Return what the config.json of a folder says. Raises ConfigError."""
    where = folder.where(CONFIG)
    fields = Fields(folder.config, where)
    family, kind = _kind_of(fields)
    architectures = fields.take("architectures", None)
    if architectures not in (None, [], [kind.architecture]):
        fields.refuse("architectures", f"needed {kind.architecture}, a model of language alone")
    for name in DTYPE_FIELDS:
        if fields.take(name, None) not in (None, "auto", *TORCH.values()):
            fields.refuse(name, f"needed {', '.join(TORCH.values())}")
    further = max(fields.integer(name, 0, least=0) for name in FURTHER_FIELDS)
    kind.read(fields)
    fields.finish()
    _require_possible(fields)
    lines = [f'model.family = "{family}"', *fields.lines]
    if folder.wrappers:
        lines.append(f"names of tensors are read without {listed(folder.wrappers)}")
    return ModelKeys(kind, {"model.family": family, **fields.keys}, where, lines, further)


def possible_keys_of(folder: ModelFolder) -> ModelKeys:
    """Return what the config.json of a folder says, once a model can be planned by it.

    Raises ConfigError for sizes that don't fit each other, WeightsError for too few tensors.
    """
    keys = keys_of(folder)
    try:
        config = with_keys(LoadedConfig(Config(), NONE), keys.keys, keys.where).config
        resolve(on_one_rank(config), 1, keys.vocab)
    except ConfigError as error:
        raise ConfigError(f"{keys.where}: {error.args[0]}") from None
    layers, number = keys.keys["model.layers"], len(folder.names)
    if number < LEAST_TENSORS * layers:
        what = f"{keys.where} says {layers:,} layers, and the folder has {number:,} of their tensors"
        raise WeightsError(f"{what}, too few for these; get the whole folder")
    return keys


def _require_possible(fields: Fields) -> None:
    for table in TABLES:
        type_of_table = type(getattr(Config(), table))
        for key, value in fields.keys.items():
            if key.startswith(f"{table}."):
                try:
                    msgspec.convert({key.partition(".")[2]: value}, type_of_table)
                except msgspec.ValidationError as error:
                    what = str(error).partition(" - at ")[0]
                    raise ConfigError(f"{fields.where} gives {key} = {shown(repr(value))}: {what}") from None


def _kind_of(fields: Fields) -> tuple[str, ModelType]:
    name = fields.take("model_type", "")
    if not isinstance(name, str) or not name:
        fields.refuse("model_type", "needed the name of a kind of model", name)
    if isinstance(fields.tree.get("text_config"), Mapping):
        fields.refuse("model_type", "a model of text and images; needed one of text alone")
    families = FAMILIES.built_in().items()
    known = {kind.name: (name, kind) for name, family in families for kind in family.model_types}
    if name not in known:
        fields.refuse("model_type", f"no family reads it; known are {listed(sorted(known), 40)}")
    return known[name]


def with_keys(begun: LoadedConfig, keys: Mapping[str, Any], where: str) -> LoadedConfig:
    """Return a configuration with a model's keys; its own go before. Raises ConfigError."""
    config = begun.config
    if begun.origins.is_given("model.preset"):
        what = f'model.preset = "{shown(config.model.preset)}" with model.init'
        raise ConfigError(f"{what}: the sizes are those of {where}; leave model.preset out")
    changes, differing = {}, {}
    for key, value in keys.items():
        table, _, name = key.partition(".")
        given = getattr(getattr(config, table), name)
        if given is None or given == "":
            changes[key] = value
        elif given != value and key not in OPEN and not key.startswith(OPEN_PREFIXES):
            differing[key] = given
    if differing and not _say_the_same_model(keys, {**keys, **differing}):
        key, given = next(iter(differing.items()))
        has = f"{where} has {shown(repr(keys[key]))}"
        raise ConfigError(f"{key} = {shown(repr(given))}, but {has}; leave it out")
    if config.model.vocab is not None and config.model.vocab < keys["model.vocab"]:
        less = f"model.vocab = {config.model.vocab} is less than the {keys['model.vocab']} of {where}"
        raise ConfigError(f"{less}; leave it out, or use more")
    return begun.changed(settings.with_values(config, changes), KeyOrigin(FOLDER, where))


def plan_on_one_rank(config: Config) -> Plan:
    """Return the plan of a model whose keys are all there, on one rank."""
    tokens = config.model.vocab - (config.model.padding or 0)
    return plan_of(resolve(on_one_rank(config), 1, tokens))


def without_training(config: Config, num_rows: int) -> Config:
    """Return the configuration by which a model is computed on the CPU, for so many rows."""
    batch = Batch(global_=num_rows, micro=num_rows)
    plain = OptimizerTable(name="sgd", momentum=0.0)
    config = settings.with_values(config, {"run.device": "cpu"})
    return msgspec.structs.replace(config, batch=batch, memory=Memory(), numerics=Numerics(), optimizer=plain)


def _say_the_same_model(keys: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    try:
        bare = LoadedConfig(Config(), NONE)
        plans = [plan_on_one_rank(with_keys(bare, of_model, "").config) for of_model in (keys, others)]
    except ConfigError:
        return False
    first, second = (spelled_out(plan.config).model for plan in plans)
    return first == second


def spelled_out(config: Config) -> Plan:
    """Return the plan of a resolved configuration's model, with every number that stands for another.

    Equal models have equal layers then: a width of 0 is that of a head, and blocks with windows or
    experts may be said in several ways. The vocabulary isn't padded.
    """
    model, own, experts = config.model, config.attention, config.experts
    said: dict[str, Any] = {"model.vocab": model.vocab - (model.padding or 0)}
    said |= {"model.padding": 0, "model.vocab_multiple": 1}
    for key in ("head_width", "score_width"):
        if key in family_of(model).attention and not getattr(own, key):
            said[f"attention.{key}"] = head_width(config)
    if own.yarn_mscale is not None:  # read back it has other last digits
        said["attention.yarn_mscale"] = round(own.yarn_mscale, 12)
    if experts.count:
        sparse = has_experts(model.layers, experts.first, experts.every)
        said["experts.first"], said["experts.every"] = first_and_every(sparse)
        if experts.groups_active == experts.groups:
            said |= {"experts.groups": 1, "experts.groups_active": 1}
    return plan_on_one_rank(settings.with_values(config, said))


# ---------------------------------------------------------------- and back


def fields_of(config: Config) -> tuple[ModelType, dict[str, Any]]:
    """Return a model's type, and its fields of config.json. Raises WeightsError if it has none."""
    family = family_of(config.model)
    if not family.model_types:
        has = f"model.family = {shown(config.model.family)} has no model type in Hugging Face folders"
        raise WeightsError(f"{has} that can say this model")
    kind = family.model_types[0]
    return kind, kind.write(config)


def config_json(
    config: Config, code: str, carried: Mapping[str, Any], ends: Mapping[str, int | None]
) -> dict[str, Any]:
    """Return the object of config.json for a resolved configuration. code: dtype of the tensors.

    carried: the one that the weights came with. ends: special tokens, where that says nothing.
    """
    kind, fields = fields_of(config)
    special = dict(ends)
    for name in ends.keys() & carried.keys():  # which may be a stranger's: its values can be anything
        value = carried[name]
        tokens = value if isinstance(value, list) else [value]
        if value is None or all(type(token) is int and token >= 0 for token in tokens):
            special[name] = value
    positions = carried.get("max_position_embeddings")
    is_longer = isinstance(positions, int) and positions > fields.get("max_position_embeddings", 0)
    if is_longer and not config.attention.dynamic_length:  # dynamic scaling begins there
        fields["max_position_embeddings"] = positions
    kinds = {"architectures": [kind.architecture], "model_type": kind.name}
    return {**kinds, **fields, **special, "dtype": TORCH[code], "use_cache": True}


def require_same_model(folder: ModelFolder, plan: Plan) -> ModelKeys:
    """Return a folder's keys. Raises MpitrainError unless its layers are those of a plan."""
    keys = keys_of(folder)
    config = plan.config
    own = {name: getattr(config.experts, name) for name in OF_TRAINING}
    bare = msgspec.structs.replace(
        config,
        model=settings.Model(mtp=config.model.mtp, mtp_weight=config.model.mtp_weight),
        attention=settings.AttentionTable(),
        experts=settings.ExpertsTable(**own),
    )
    again = plan_on_one_rank(with_keys(LoadedConfig(bare, NONE), keys.keys, keys.where).config)
    expected, said = spelled_out(config), spelled_out(again.config)
    if said.model != expected.model:
        of_plans = (plan.config for plan in (expected, said, plan, again))
        wanted, found, before, after = map(settings.flatten, of_plans)
        differing = [
            f"{key} = {before[key]!r} became {after[key]!r}"
            for key in found
            if key.partition(".")[0] in TABLES and wanted[key] != found[key] and before[key] != after[key]
        ]
        what = f"{keys.where} doesn't say this model: {listed(differing) or 'its layers differ'}"
        raise MpitrainError(f"{what}; no {keys.kind.name} of transformers computes it")
    return keys

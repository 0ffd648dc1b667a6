"""config.json of a Hugging Face folder as keys of ours, and back.

A family says what the fields of its model types mean (plan/declared/hugging_face.py).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from mpitrain import config as settings
from mpitrain.config import Config, LoadedConfig
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
# blocks after the last one that predict further tokens, by both names of 5.x
LEAST_TENSORS = 4  # of a block, in any family: a norm, two products of attention, one of the ffn
FURTHER_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers")
DTYPE_FIELDS = ("dtype", "torch_dtype")  # of 5.x and 4.x


class ModelKeys(NamedTuple):
    """What a config.json says.

    family: value of model.family.
    kind: its model type.
    keys: by our names, `model.width`.
    lines: of the report.
    further: blocks that only predict further tokens.
    """

    family: str
    kind: ModelType
    keys: dict[str, Any]
    lines: list[str]
    further: int

    @property
    def vocab(self) -> int:
        """Tokens that the folder has a row for."""
        return self.keys["model.vocab"]


def keys_of(folder: ModelFolder) -> ModelKeys:
    """Return what the config.json of a folder says. Raises ConfigError."""
    fields = Fields(folder.config, folder.where(CONFIG))
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
    return ModelKeys(family, kind, fields.keys, lines, further)


def require_blocks(folder: ModelFolder, found: ModelKeys) -> None:
    """Raise WeightsError for more blocks than tensors can make, before so many are planned."""
    layers, number = found.keys["model.layers"], len(folder.names)
    if number < LEAST_TENSORS * layers:
        raise WeightsError(
            f"{folder.where(CONFIG)} says {layers:,} layers, and the folder has {number:,} of their "
            "tensors, too few for these; get the whole folder"
        )


def _require_possible(fields: Fields) -> None:
    """Raise ConfigError for a key whose value no configuration may have."""
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


def filled(given: LoadedConfig, found: ModelKeys, where: str) -> LoadedConfig:
    """Return a configuration whose model is that of a folder; its own keys go before, where they may.

    Raises ConfigError for a key that says another model.
    """
    return with_keys(given, {"model.family": found.family, **found.keys}, where)


def require_model(found: ModelKeys, where: str) -> None:
    """Raise ConfigError, which names the file, for sizes that don't fit each other."""
    try:
        resolve(on_one_rank(filled(LoadedConfig(Config(), NONE), found, where).config), 1, found.vocab)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.args[0]}") from None


def with_keys(begun: LoadedConfig, keys: Mapping[str, Any], where: str) -> LoadedConfig:
    """Return a configuration with keys of a model from `where`, if it has none of its own."""
    config = begun.config
    if begun.origins.is_given("model.preset"):
        raise ConfigError(
            f'model.preset = "{shown(config.model.preset)}" with model.init: the sizes are those of '
            f"{where}; leave model.preset out"
        )
    changes: dict[str, dict[str, Any]] = {table: {} for table in TABLES}
    differing = {}
    for key, value in keys.items():
        table, _, name = key.partition(".")
        given = getattr(getattr(config, table), name)
        if given is None or given == "":
            changes[table][name] = value
        elif given != value and key not in OPEN and not key.startswith(OPEN_PREFIXES):
            differing[key] = given
    if differing and not _say_the_same_model(keys, {**keys, **differing}):
        key, given = next(iter(differing.items()))
        raise ConfigError(
            f"{key} = {shown(repr(given))}, but {where} has {shown(repr(keys[key]))}; leave it out"
        )
    if config.model.vocab is not None and config.model.vocab < keys["model.vocab"]:
        raise ConfigError(
            f"model.vocab = {config.model.vocab} is less than the {keys['model.vocab']} of {where}; leave it "
            "out, or use more"
        )
    tables = {
        table: msgspec.structs.replace(getattr(config, table), **new) for table, new in changes.items() if new
    }
    return begun.changed(msgspec.structs.replace(config, **tables), KeyOrigin(FOLDER, where))


def plan_on_one_rank(config: Config) -> Plan:
    """Return the plan of a model whose keys are all there, on one rank."""
    tokens = config.model.vocab - (config.model.padding or 0)
    return plan_of(resolve(on_one_rank(config), 1, tokens))


def _say_the_same_model(keys: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Return whether two sets of keys, equal or not, are the same model when they are resolved."""
    try:
        bare = LoadedConfig(Config(), NONE)
        first, second = (
            plan_on_one_rank(with_keys(bare, model_keys, "").config) for model_keys in (keys, others)
        )
    except ConfigError:
        return False
    return spelled_out(first.config).model == spelled_out(second.config).model


def spelled_out(config: Config) -> Plan:
    """Return the plan of a resolved configuration's model, with every number that stands for another.

    Equal models have equal layers then: a width of 0 is that of a head, and blocks with windows or
    experts may be said in several ways. The vocabulary isn't padded.
    """
    model = config.model
    own = config.attention
    experts = config.experts
    known = family_of(model).attention
    of_a_head = [key for key in ("head_width", "score_width") if key in known and not getattr(own, key)]
    attention: dict[str, Any] = dict.fromkeys(of_a_head, head_width(config))
    if own.yarn_mscale is not None:  # read back it has other last digits
        attention["yarn_mscale"] = round(own.yarn_mscale, 12)
    of_experts: dict[str, Any] = {}
    if experts.count:
        sparse = has_experts(model.layers, experts.first, experts.every)
        of_experts["first"], of_experts["every"] = first_and_every(sparse)
        if experts.groups_active == experts.groups:
            of_experts |= {"groups": 1, "groups_active": 1}
    return plan_on_one_rank(
        msgspec.structs.replace(
            config,
            model=msgspec.structs.replace(
                model, vocab=model.vocab - (model.padding or 0), padding=0, vocab_multiple=1
            ),
            attention=msgspec.structs.replace(own, **attention),
            experts=msgspec.structs.replace(experts, **of_experts),
        )
    )


# ---------------------------------------------------------------- and back


def fields_of(config: Config) -> tuple[ModelType, dict[str, Any]]:
    """Return the model type and the fields of config.json for a resolved configuration's model.

    Raises WeightsError if no model type of the family has this model.
    """
    family = family_of(config.model)
    if not family.model_types:
        raise WeightsError(
            f"model.family = {shown(config.model.family)} has no model type in Hugging Face folders that can "
            "say this model"
        )
    kind = family.model_types[0]
    return kind, kind.write(config)


def config_json(
    config: Config, code: str, carried: Mapping[str, Any], ends: Mapping[str, int | None]
) -> dict[str, Any]:
    """Return the object of config.json for a resolved configuration's model.

    code: dtype of the tensors.
    carried: the config.json that the weights once came with, or nothing.
    ends: numbers of special tokens, where that one says nothing.
    """
    kind, fields = fields_of(config)
    kept = {name: carried[name] for name in ends if name in carried and _are_tokens(carried[name])}
    special = {**ends, **kept}
    positions = carried.get("max_position_embeddings")
    is_longer = isinstance(positions, int) and positions > fields.get("max_position_embeddings", 0)
    if is_longer and not config.attention.dynamic_length:  # dynamic scaling begins there
        fields["max_position_embeddings"] = positions
    return {
        "architectures": [kind.architecture],
        "model_type": kind.name,
        **fields,
        **special,
        "dtype": TORCH[code],
        "use_cache": True,
    }


def _are_tokens(value: Any) -> bool:
    """Return whether a value of a stranger's JSON is the number of a token, or several, or null."""
    tokens = value if isinstance(value, list) else [value]
    return value is None or all(type(token) is int and token >= 0 for token in tokens)


def require_same_model(folder: ModelFolder, plan: Plan) -> ModelKeys:
    """Return what a folder's config.json says. Raises MpitrainError unless that is the model of a plan.

    The layers that it makes have to be equal, with every number that they compute with.
    """
    keys = keys_of(folder)
    config = plan.config
    own = {name: getattr(config.experts, name) for name in OF_TRAINING}
    bare = msgspec.structs.replace(
        config,
        model=settings.Model(mtp=config.model.mtp, mtp_weight=config.model.mtp_weight),
        attention=settings.AttentionTable(),
        experts=settings.ExpertsTable(**own),
    )
    again = plan_on_one_rank(filled(LoadedConfig(bare, NONE), keys, folder.where(CONFIG)).config)
    expected, said = spelled_out(config), spelled_out(again.config)
    if said.model != expected.model:
        before, after = settings.flatten(config), settings.flatten(again.config)
        resolved = settings.flatten(expected.config)
        differing = [
            f"{key} = {before[key]!r} became {after[key]!r}"
            for key, value in settings.flatten(said.config).items()
            if key.partition(".")[0] in TABLES and resolved[key] != value and before[key] != after[key]
        ]
        raise MpitrainError(
            f"{folder.where(CONFIG)} doesn't say this model: {listed(differing) or 'its layers differ'}; no "
            f"{keys.kind.name} of transformers computes it"
        )
    return keys

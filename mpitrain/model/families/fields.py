"""Fields of config.json that families share (transformers 5.24).

Each reads its field into a key of ours, and writes it from there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.plan.declared.hugging_face import MOST, REQUIRED, ConfigField, Fields
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.settings.attention import head_width

MOST_LAYERS = 10_000  # as model.layers: what a stranger's file has of each layer is gone through


def value_of(config: ResolvedConfig, key: str) -> Any:
    """Return the value of a key, such as model.width."""
    table, _, name = key.partition(".")
    return getattr(getattr(config, table), name)


# ---------------------------------------------------------------- one field, one key


@dataclass(frozen=True)
class OfKey:
    """A field whose value is that of a key. default: where it is absent, or what says it."""

    name: str
    key: str
    default: Any | Callable[[Fields], int] = REQUIRED

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return {self.name: value_of(config, self.key)}


@dataclass(frozen=True)
class Whole(OfKey):
    """A whole number. other: another name. null: its meaning. or_null: 0 is written as null."""

    least: int = 1
    most: int = MOST
    null: Any = REQUIRED
    or_null: bool = False
    other: str = ""

    def read(self, fields: Fields) -> None:
        name = fields.either(self.name, self.other) if self.other else self.name
        default = self.default(fields) if callable(self.default) else self.default
        fields.integer(name, default, to=self.key, least=self.least, most=self.most, null=self.null)

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        value = value_of(config, self.key)
        return {self.name: value or None if self.or_null else value}


def optional(name: str, key: str, default: int) -> Whole:
    """Return a whole number of which null and 0 mean that the model has no such thing."""
    return Whole(name, key, default, least=0, null=0, or_null=True)


@dataclass(frozen=True)
class Number(OfKey):
    """A number above 0. share: from 0 to below 1."""

    share: bool = False

    def read(self, fields: Fields) -> None:
        fields.number(self.name, self.default, to=self.key, share=self.share)


class Flag(OfKey):
    """True or false."""

    def read(self, fields: Fields) -> None:
        fields.flag(self.name, self.default, to=self.key)

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return {self.name: bool(value_of(config, self.key))}


# ---------------------------------------------------------------- fields that no key has


class Only:
    """A field that has one of these values; absent it has the first, which is written."""

    def __init__(self, name: str, *allowed: Any):
        self.name = name
        self.allowed = allowed

    def read(self, fields: Fields) -> None:
        fields.only(self.name, *self.allowed)

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return {self.name: self.allowed[0]}


class Unwritten(Only):
    """A field that is like that where it is there."""

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return {}


class Ignored(ConfigField):
    """Fields that say nothing of the model."""

    def __init__(self, *names: str):
        self.names = names

    def read(self, fields: Fields) -> None:
        fields.take_no_notice(*self.names)


SILU = Only("hidden_act", "silu", "swish")


def eps(default: float, name: str = "rms_norm_eps") -> Number:
    """Return what norms add to the mean of the squares."""
    return Number(name, "model.eps", default)


# ---------------------------------------------------------------- sizes


def longest(config: ResolvedConfig) -> int:
    """Return max_position_embeddings: dynamic scaling begins there."""
    return config.attention.dynamic_length or config.data.sequence


class VocabularySize:
    """The rows of the embedding, of which padding isn't written."""

    def read(self, fields: Fields) -> None:
        fields.integer("vocab_size", to="model.vocab")

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return dict(vocab_size=config.model.vocab - (config.model.padding or 0))


class KeyValueHeads(OfKey):
    """default None: as many as heads, which null always means."""

    def read(self, fields: Fields) -> None:
        heads = fields.keys["model.heads"]
        fields.integer(self.name, self.default or heads, to=self.key, null=heads)


class Length(ConfigField):
    """The longest text, which is read beside a scaling of positions, and the spread of first weights."""

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return dict(max_position_embeddings=longest(config), initializer_range=0.02)


def sizes(kv_heads: int | None = None, *, tied: bool = False) -> tuple[ConfigField, ...]:
    """Return what all families have. tied: where tie_word_embeddings is absent."""
    return (
        Whole("num_hidden_layers", "model.layers", most=MOST_LAYERS),
        Whole("hidden_size", "model.width"),
        Whole("num_attention_heads", "model.heads"),
        KeyValueHeads("num_key_value_heads", "model.kv_heads", kv_heads),
        Whole("intermediate_size", "model.ffn"),
        VocabularySize(),
        Flag("tie_word_embeddings", "model.tied", tied),
        Length(),
    )


@dataclass(frozen=True)
class HeadWidth:
    """head_dim. It is always written, as every reader wants it.

    default: where it is absent; 0: the width over heads, as null always is.
    divides: transformers 5 refuses a width that isn't a multiple of heads, whatever head_dim is.
    """

    default: int = 0
    divides: bool = False

    def read(self, fields: Fields) -> None:
        width = fields.take("head_dim", self.default or None, null=None)
        if width is not None:
            fields.integer("head_dim", self.default, to="attention.head_width")
        elif fields.keys["model.width"] % fields.keys["model.heads"]:
            why = "absent, it means hidden_size / num_attention_heads, which is no number"
            fields.refuse("head_dim", why)

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        model = config.model
        if self.divides and model.width % model.heads:
            raise ConfigError(
                f"model.width = {model.width} with model.heads = {model.heads} can't be written: "
                f"transformers loads a {model.family} only if width is a multiple of heads; train "
                "mistral, qwen2 or qwen3 with these sizes, or others"
            )
        return dict(head_dim=head_width(config))


@dataclass(frozen=True)
class Biases:
    """Whether the products of attention have biases. where: "all" with that of the output, or "qkv".
    unlike: why the other can't be written.
    """

    where: str = "all"
    unlike: str = "'qkv' can't be written: attention_bias is of the output, too; use all or none"

    def read(self, fields: Fields) -> None:
        biased = fields.flag("attention_bias", False)
        fields.give("attention.biases", self.where if biased else "none", "attention_bias")

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        biases = config.attention.biases
        if biases not in (self.where, "none", None):
            raise ConfigError(f"attention.biases = {self.unlike}")
        return dict(attention_bias=biases == self.where)


FFN_BIASES = Flag("mlp_bias", "model.ffn_biased", False)

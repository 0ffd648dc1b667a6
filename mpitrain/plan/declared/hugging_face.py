"""What a family says of Hugging Face folders: which fields of config.json become which keys, and how its
weights lie in safetensors files. The converter (mpitrain/weights/) knows no family.

A family has a ModelType for each value of `model_type` that it reads or writes, and in
weight_names["huggingface"] the name of each weight there; a weight that doesn't lie there as it
does here has a Stored instead of a name:

    WEIGHTS = {
        "embedding.weight": "model.embed_tokens.weight",                 the same numbers, the same shape
        "blocks.{block}.ffn.experts.up.weight":                          ours [E, I, D]: E tensors [I, D]
            "model.layers.{block}.mlp.experts.{expert}.up_proj.weight",
        "blocks.{block}.attention.q.weight": Stored(                     a part of a tensor, transposed
            "transformer.h.{block}.attn.c_attn.weight",
            shape=lambda ours, config: (ours[1], 3 * ours[1]),
            views=lambda ours, theirs, config: [(ours, theirs[:, : ours.shape[0]].T)],
        ),
    }
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from mpitrain.errors import ConfigError
from mpitrain.inputs import listed, shown
from mpitrain.plan.declared.resolved import ResolvedConfig

if TYPE_CHECKING:
    import numpy as np

FORMAT = "huggingface"  # the key of ModelFamily.weight_names
Shape = tuple[int, ...]
Views = Iterable[tuple["np.ndarray", "np.ndarray"]]


def same_shape(ours: Shape, config: ResolvedConfig) -> Shape:
    """Return the shape of a weight that is stored as it is."""
    return ours


def same_views(ours: "np.ndarray", theirs: "np.ndarray", config: ResolvedConfig) -> Views:
    """Return both arrays whole."""
    return [(ours, theirs)]


@dataclass(frozen=True)
class Stored:
    """How a weight lies in a tensor of a safetensors file.

    name: of the tensor, by the resolved configuration if need be; {block} and {expert} are numbers.
    With {expert}, every expert has a tensor, and shape and views are of one expert's.
    shape: of the whole tensor, from the weight's shape and the resolved configuration.
    views: pairs of views of the weight and of the tensor, equal in shape, which hold the same
    numbers. Together they are all of the weight, and a part of the tensor that no other weight has.
    They are used in both directions, so a view must not be a copy (numpy: slices, transposition,
    reshape of split axes).
    exact: written as the checkpoint has it, whatever --dtype says.
    """

    name: str | Callable[[ResolvedConfig], str]
    shape: Callable[[Shape, ResolvedConfig], Shape] = same_shape
    views: Callable[["np.ndarray", "np.ndarray", ResolvedConfig], Views] = same_views
    exact: bool = False

    def name_for(self, config: ResolvedConfig) -> str:
        """Return the name of the tensor, with {block} and {expert}."""
        return self.name if isinstance(self.name, str) else self.name(config)

    @property
    def plain(self) -> bool:
        """Whether the tensor is the weight as it is."""
        return self.views is same_views


def as_stored(form: str | Stored) -> Stored:
    """Return how a weight lies in a file, of what weight_names has for it."""
    return form if isinstance(form, Stored) else Stored(form)


class ConfigField(Protocol):
    """A field of config.json, or several, in both directions (model/families/fields.py)."""

    def read(self, fields: "Fields") -> None:
        """Give keys of ours what the file says, by Fields.give(); refuse other models by Fields.refuse()."""

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        """Return what the file says for a resolved configuration. Raises ConfigError if it can't."""
        return {}


@dataclass(frozen=True)
class ModelType:
    """A value of config.json's model_type that a family reads and writes.

    name: the value.
    architecture: the class in transformers, of `architectures`.
    fields: of config.json, without those that every one has. What none of them looks at is refused
    afterwards, unless it is HARMLESS.
    ignored: patterns (re.fullmatch) of names of tensors that are not part of the model.
    prefix: names of tensors may lack it, all of them alike.
    """

    name: str
    architecture: str
    fields: tuple[ConfigField, ...]
    ignored: tuple[str, ...] = ()
    prefix: str = ""

    def read(self, fields: "Fields") -> None:
        """Give keys of ours what a config.json says."""
        for each in self.fields:
            each.read(fields)

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        """Return the fields for a resolved configuration. Raises ConfigError for what they can't say."""
        written: dict[str, Any] = {}
        for each in self.fields:
            written |= each.write(config)
        return written


# Fields that say nothing of weights or logits.
HARMLESS = frozenset({
    "_name_or_path", "architectures", "transformers_version", "transformers.js_config", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "decoder_start_token_id", "model_type", "max_position_embeddings", "max_window_layers",
    "pretraining_tp", "initializer_range", "classifier_dropout", "output_router_logits",
    "router_aux_loss_coef", "rope_interleaved", "torch_dtype", "dtype", "auto_map", "id2label",
    "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "return_dict",
    "output_attentions", "output_hidden_states", "return_dict_in_generate", "chunk_size_feed_forward",
    "is_encoder_decoder", "is_decoder", "attn_implementation", "_attn_implementation",
    "_attn_implementation_autoset", "tokenizer_class", "prefix", "summary_type", "summary_use_proj",
    "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "torchscript",
    "unsloth_version", "unsloth_fixed", "num_nextn_predict_layers", "num_mtp_layers",
    # published with SmolLM2, Gemma 2 and 3, DistilGPT-2, DialoGPT, GPT-2 Medium, the first Llamas, and by
    # 4.x and before
    "n_special", "predict_special_tokens", "max_sequence_length",
    "is_llama_config", "cache_implementation", "_num_labels", "output_past", "gradient_checkpointing",
    "tie_encoder_decoder", "tf_legacy_loss", "use_bfloat16", "cross_attention_hidden_size", "_commit_hash",
    # of how text is generated, which 5.x takes out of it
    "max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams", "temperature",
    "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "suppress_tokens",
    "exponential_decay_length_penalty", "begin_suppress_tokens", "num_beam_groups", "diversity_penalty",
})  # fmt: skip
# Fields that must have one of these values where they are there, whatever the family; null always will do.
ONLY: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0,),
    "hidden_dropout": (0,),
    "add_cross_attention": (False,),
    "use_bidirectional_attention": (False,),
    "router_jitter_noise": (0,),
    "clip_qkv": (),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "pruned_heads": ({},),
}
QUANTIZED = (
    "its weights are quantized, which isn't read: give a folder of the same model in bf16, or have "
    "transformers write one (from_pretrained with dequantize, then save_pretrained)"
)
ORIGINAL_POSITIONS = "original_max_position_embeddings"
# of each rope_type, besides rope_type and rope_theta: its fields, and our keys; "": several make one
ROPE_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "linear_factor"},
    "dynamic": {"factor": "dynamic_factor", ORIGINAL_POSITIONS: "dynamic_length"},
    "llama3": {
        "factor": "llama3_factor", ORIGINAL_POSITIONS: "llama3_length",
        "low_freq_factor": "llama3_low", "high_freq_factor": "llama3_high",
    },
    "yarn": {
        "factor": "yarn_factor", ORIGINAL_POSITIONS: "yarn_length", "beta_fast": "yarn_fast",
        "beta_slow": "yarn_slow", "truncate": "yarn_rounded",
        **dict.fromkeys(("mscale", "mscale_all_dim", "attention_factor"), ""),
    },
}  # fmt: skip
OR_ZERO = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # 0 is as if they were absent


class _Required:
    def __repr__(self) -> str:
        return "nothing"


REQUIRED: Any = _Required()
MOST = 2**31 - 1  # of a whole number
# of a number of rotary positions: a whole one in JSON may be beyond any float, which math.isfinite can't take
MOST_OF_ROPE = 1e300
Value = TypeVar("Value")


@dataclass
class Fields:
    """The fields of a config.json, while a family reads them. Every mistake raises ConfigError.

    tree, where: the file's object, and its path.
    keys: what they become, by our keys: {"model.width": 576}.
    lines: of the report, one for each key.
    """

    tree: Mapping[str, Any]
    where: str
    keys: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    # ------------------------------------------------------------ one field

    def take(self, name: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return a field as it is. default: where it is absent.  null: where it is null, else as absent."""
        self._seen.add(name)
        value = self.tree.get(name, REQUIRED)
        if value is None:
            value = default if null is REQUIRED else null
        if value is REQUIRED:
            value = default
        if value is REQUIRED:
            raise ConfigError(
                f"{self.where}: {name} is missing, which says the model's size; add what its authors state"
            )
        return value

    def integer(
        self,
        name: str,
        default: Any = REQUIRED,
        *,
        to: str = "",
        least: int = 1,
        most: int = MOST,
        null: Any = REQUIRED,
    ) -> int:
        """Return a whole number from `least` to `most`, and give it to the key `to`."""
        value = self.take(name, default, null)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            end = "on" if most == MOST else f"to {most:,}"
            self.refuse(name, f"needed a whole number from {least} {end}", value)
        return self._given(name, value, to)

    def number(self, name: str, default: Any = REQUIRED, *, to: str = "", share: bool = False) -> float:
        """Return a finite number above 0, and give it to the key `to`. share: from 0 to below 1."""
        value = self.take(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (0 <= value < 1 if share else 0 < value < 1e300):
            needed = "a number from 0 to below 1" if share else "a number above 0"
            self.refuse(name, f"needed {needed}", value)
        return self._given(name, float(value), to)

    def flag(self, name: str, default: Any = REQUIRED, *, to: str = "") -> bool:
        """Return true or false, and give it to the key `to`. Null is false, as in transformers."""
        value = self.take(name, default, null=False)
        if not isinstance(value, bool):
            self.refuse(name, "needed true or false", value)
        return self._given(name, value, to)

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse a field unless it has one of these values; absent means the first, null too unless true."""
        value = self.take(name, allowed[0], null=False if allowed[0] is True else REQUIRED)
        if not any(_same(value, choice) for choice in allowed):
            what = "it may be" if name in self.tree else "absent, it means another model: add it, as"
            self.refuse(name, f"{what} {' or '.join(map(_json, allowed))} in a model of this family", value)

    def either(self, name: str, other: str) -> str:
        """Return which of two names that a field has is there, the first where none is."""
        if self.tree.get(other) is None:
            return name
        if self.tree.get(name) is None:
            return other
        if not _same(self.tree[name], self.tree[other]):
            text = shown(_json(self.tree[name]))
            self.refuse(other, f"it is another name of {name}, which is {text}; leave one out")
        self.take_no_notice(other)
        return name

    def take_no_notice(self, *names: str) -> None:
        """Let fields be whatever they are."""
        self._seen.update(names)

    def give(self, key: str, value: Any, of: str = "") -> None:
        """Give a key of ours a value.  of: the field that says so."""
        self.keys[key] = value
        self.lines.append(f"{key} = {_json(value)}" + (f"  ({of})" if of else ""))

    def refuse(self, name: str, why: str, value: Any = REQUIRED) -> NoReturn:
        """Raise ConfigError for a field."""
        current = self.tree.get(name, value)
        raise ConfigError(f"{self.where}: {shown(name)} = {shown(_json(current))}: {why}")

    def _given(self, name: str, value: Value, to: str) -> Value:
        if to:
            stated = self.tree.get(name)
            self.give(to, value, name if stated is not None else f"{name} is absent: the class's default")
        return value

    # ------------------------------------------------------------ rotary positions

    @property
    def positions_field(self) -> str:
        """The field that has rotary positions: 4.x's name, or 5.x's."""
        return "rope_scaling" if self.tree.get("rope_scaling") else "rope_parameters"

    def rope(
        self,
        theta: float,
        default: Mapping[str, Any] | None = None,
        rope_object: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return rotary positions as one object, as 5.x writes them, of either spelling, 4.x's or 5.x's.

        It has rope_type, rope_theta and what the type has besides.
        theta: the class's default.
        default: the class's own object, where none is there.
        rope_object: an object that is read instead of the field.
        """
        name = self.positions_field
        if rope_object is None:
            rope_object = self.rope_objects()[name]
        if rope_object is None:
            rope_object = default or {}
        rope_object = {key: value for key, value in rope_object.items() if value is not None}
        kind = rope_object.pop("rope_type", rope_object.pop("type", "default"))
        rope_object.pop("type", None)
        if kind not in list(ROPE_KEYS):  # which may be no text
            self.refuse(name, f"rope_type may be {' or '.join(ROPE_KEYS)} in a model of this family")
        of_theta = name if "rope_theta" in rope_object else "rope_theta"
        rope_object.setdefault("rope_theta", self.tree.get("rope_theta", theta))
        rope_object.pop("finetuned", None)  # YaRN's authors wrote it
        if _same(rope_object.get("partial_rotary_factor"), 1):
            del rope_object["partial_rotary_factor"]
        if unread := sorted(rope_object.keys() - {"rope_theta", *ROPE_KEYS[kind]}):
            self.refuse(name, f"{listed(unread)} isn't understood beside rope_type {kind}")
        for key, value in rope_object.items():
            if not _is_of_rope(key, value):
                of_key = of_theta if key == "rope_theta" else name
                self.refuse(of_key, f"{key} = {shown(_json(value))}, needed a number above 0")
        if not rope_object["rope_theta"] > 1:
            self.refuse(of_theta, "rope_theta, needed above 1")
        return {"rope_type": kind, **rope_object}

    def rope_objects(self) -> dict[str, Mapping[str, Any] | None]:
        """Return the objects of both spellings, None for one that isn't there."""
        self._seen.update(("rope_theta", "rope_scaling", "rope_parameters"))
        both = {name: self.tree.get(name) for name in ("rope_scaling", "rope_parameters")}
        for name, rope in both.items():
            if not isinstance(rope, Mapping | None):
                self.refuse(name, "needed an object")
        return both

    # ------------------------------------------------------------ the rest

    def finish(self) -> None:
        """Refuse every field that nobody has looked at, unless it says nothing of weights or logits."""
        for name, allowed in ONLY.items():
            value = self.tree.get(name)
            if name in self._seen or value is None or any(_same(value, choice) for choice in allowed):
                continue
            why = QUANTIZED if name == "quantization_config" else "no model of this family computes that"
            self.refuse(name, why)
        unknown = self.tree.keys() - self._seen - HARMLESS - ONLY.keys()
        for name in sorted(name for name in unknown if self.tree[name] is not None):
            self.refuse(name, "it isn't understood, and may mean another model; leave it out if it does not")


def _is_of_rope(key: str, value: Any) -> bool:
    if key == "truncate":
        return isinstance(value, bool)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and (0 < value < MOST_OF_ROPE or (key in OR_ZERO and value == 0))


def _same(value: Any, allowed: Any) -> bool:
    """Return whether two values of JSON are equal; true isn't 1."""
    return value == allowed and isinstance(value, bool) == isinstance(allowed, bool)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value)

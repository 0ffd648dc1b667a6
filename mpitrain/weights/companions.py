"""What belongs to a model beside its weights: its tokenizer, ends, chat template, and the like.

A Hugging Face folder has them as files. A run keeps them in its folder `huggingface`, where the
next run and an export find them, through any number of runs:

    config.json              what the weights came with: numbers of special tokens, the longest text
    generation_config.json   how text is generated
    tokenizer.json ...       the files of the run's own tokenizer

The tokenizer is the one that the run reads its texts with. If that isn't the one that the weights
came with, the files of the latter don't come along: all of them name its tokens.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.cluster.rundir import RunDir
from mpitrain.config import Data
from mpitrain.data.byte_level import byte_tokenizer_json
from mpitrain.data.origin import Origin
from mpitrain.data.panics import LibraryFailure, library_calls
from mpitrain.data.special_tokens import CONFIG as TOKENIZER_CONFIG
from mpitrain.data.special_tokens import text_of_token
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.data.tokens import describe
from mpitrain.errors import CheckpointError, DataError
from mpitrain.inputs import kind_of, os_errors_as, read_file, read_regular, replacing, shown
from mpitrain.weights.folder import (
    COMPANIONS,
    CONFIG,
    GENERATION,
    MOST_COMPANION_BYTES,
    TEMPLATES,
    TOKENIZER,
    ModelFolder,
    templates_in,
)
from mpitrain.weights.header import parsed

TOKENIZER_FILES = tuple(name for name in COMPANIONS if name != GENERATION)
# what stays true where a tokenizer has all tokens of the one before, and further ones
TEXT_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
TEXT_FILES += (f"{TEMPLATES}/",)
BYTES = "bytes"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # of transformers, for any tokenizer.json
BEGIN, END = "bos_token_id", "eos_token_id"
ENDS = (BEGIN, END, "pad_token_id")
LENGTH = "max_position_embeddings"
# ends of the names of fields that hold numbers of tokens; max_new_tokens is none
OF_TOKENS = ("_token_id", "suppress_tokens", "_words_ids", "_decoder_ids")
Files = dict[str, bytes]  # by name


def companions_of_folder(folder: ModelFolder) -> Files:
    """Return what belongs to the weights of a Hugging Face folder. Raises WeightsError."""
    return {name: folder.content(name) for name in (CONFIG, *folder.companions)}


def companions_of_run(run: RunDir) -> Files:
    """Return what belongs to the weights of a run. Raises CheckpointError."""
    try:
        came = _read(run.came_along, (CONFIG, *COMPANIONS, *templates_in(run.came_along)))
        own = _read(run.data, (TOKENIZER,))
    except OSError as error:
        raise CheckpointError(f"{shown(error.filename or run.path)}: {shown(error.strerror)}") from None
    origin = origin_of_tokens(run)
    if origin is not None and origin.tokenizer == BYTES:
        return with_tokenizer_files(came, {})
    return with_tokenizer_files(came, own) if own else came


def origin_of_tokens(run: RunDir) -> Origin | None:
    """Return what a run's own tokens were made of; None: they aren't there, or can't be read."""
    with suppress(DataError, OSError):
        return describe(run.data).origin
    return None


def length_of_run(run: RunDir) -> int:
    """Return the longest text that a run's weights came with; 0 if that isn't known. Raises OSError."""
    return length_of(object_of(_read(run.came_along, (CONFIG,)).get(CONFIG)))


def ends_of_run(run: RunDir, own: int | None) -> frozenset[int]:
    """Return the tokens at which text ends: its own, and what came along. Raises CheckpointError."""
    files = companions_of_run(run)
    known = object_of(files.get(GENERATION)).get(END, object_of(files.get(CONFIG)).get(END))
    return frozenset(number for number in (own, *_as_list(known)) if type(number) is int)


def tokenizer_of_run(run: RunDir) -> Path | None:
    """Return the file of a run's tokenizer. What belongs to it lies beside it."""
    with suppress(OSError):
        came, own = (_read(folder, (TOKENIZER,)) for folder in (run.came_along, run.data))
        if came and (not own or own == came):
            return run.came_along / TOKENIZER
        return run.tokenizer if own else None
    return None


def files_of_tokenizer(file: Path, content: bytes) -> Files:
    """Return a tokenizer's file, and what lies beside a tokenizer.json. Raises DataError."""
    files = {TOKENIZER: content}
    if file.name == TOKENIZER:
        for name in (*TOKENIZER_FILES, *templates_in(file.parent)):
            path = file.parent / name
            advice = "it belongs to the tokenizer beside it: make it a file that can be read, or move it away"
            with os_errors_as(DataError, shown(path), advice), suppress(FileNotFoundError):
                files.setdefault(name, read_file(path, MOST_COMPANION_BYTES))
    return files


def with_tokenizer(came: Files, tokenizer: Tokenizer, file: str) -> Files:
    """Return what came along, for a run with this tokenizer. file: it was read from."""
    content = tokenizer.files().get(TOKENIZER)
    if content is None or content == came.get(TOKENIZER):
        return with_tokenizer_files(came, {} if content is None else came)
    return with_tokenizer_files(came, files_of_tokenizer(Path(file), content))


def with_tokenizer_files(came: Files, own: Files) -> Files:
    """Return what came along with weights, for a run that has a tokenizer of its own; {}: bytes."""
    before = came.get(TOKENIZER)
    if TOKENIZER in own and own[TOKENIZER] == before:
        return dict(came)
    settings = {name: content for name, content in came.items() if name in (CONFIG, GENERATION)}
    if before is not None and TOKENIZER in own and _extends(own[TOKENIZER], before):
        texts = {name: content for name, content in came.items() if name.startswith(TEXT_FILES)}
        return {**settings, **texts, **own}
    for name, content in settings.items():
        tree = object_of(content)
        settings[name] = as_json({key: tree[key] for key in tree if not key.endswith(OF_TOKENS)})
    return {**settings, **own}


def write_companions(files: Files, target: Path) -> None:
    """Write files into the folder of a run that has them. Raises CheckpointError."""
    try:
        target.mkdir(exist_ok=True)
        for name, content in files.items():
            (target / name).parent.mkdir(exist_ok=True)
            with replacing(target / name) as file:
                file.write(content)
    except OSError as error:
        raise CheckpointError(f"{shown(target)}: {shown(error)}; choose another run.dir") from None


def with_length(files: Files, length: int) -> Files:
    """Return what came along, whose config.json says at least this number of tokens of a text."""
    carried = object_of(files.get(CONFIG))
    return {**files, CONFIG: as_json(carried | {LENGTH: max(length, length_of(carried))})}


def length_of(config: Mapping[str, Any]) -> int:
    """Return the longest text, in tokens, that a config.json says; 0 if it says nothing."""
    known = config.get(LENGTH, config.get("n_positions"))
    return known if type(known) is int and 0 < known < 1 << 31 else 0


def object_of(content: bytes | None) -> dict[str, Any]:
    """Return an object of JSON; an empty one for what is none."""
    with suppress(ValueError):
        return parsed(content or b"{}", "it")
    return {}


def as_json(tree: Mapping[str, Any]) -> bytes:
    return (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()


# ---------------------------------------------------------------- of an export


class SpecialTokens(NamedTuple):
    """Numbers of special tokens, by the fields of config.json."""

    carried: Mapping[str, Any]  # the config.json that the weights came with
    own: Mapping[str, int | None]  # what the run's texts had
    given: frozenset[str]  # fields whose token the user has named, which overrides the carried one

    @property
    def replaced(self) -> frozenset[str]:
        """Fields whose tokens are the run's, and not those that the weights came with."""
        known = {name: [x for x in _as_list(self.carried.get(name)) if type(x) is int] for name in self.given}
        return frozenset(name for name in self.given if self.own[name] not in known[name])

    @property
    def kept(self) -> dict[str, Any]:
        """What is kept of the config.json that the weights came with."""
        gone = self.replaced | {name for name in self.own if self.carried.get(name) is None}
        return {name: value for name, value in self.carried.items() if name not in gone}


def special_tokens(run: RunDir | None, files: Files, data: Data) -> SpecialTokens:
    """Return the special tokens of a run. data: its keys. files: companions_of_run()."""
    own: dict[str, int | None] = dict.fromkeys(ENDS)
    if run is not None and (origin := origin_of_tokens(run)) is not None:
        own |= {BEGIN: origin.begin_of_text, END: origin.end_of_text}
    named = {BEGIN: data.begin_of_text, END: data.end_of_text}
    given = frozenset(name for name, text in named.items() if text and own[name] is not None)
    return SpecialTokens(object_of(files.get(CONFIG)), own, given)


def document_tokens(run: RunDir, tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """Return the tokens that begin and end a document, as a run's own tokens have them."""
    origin = origin_of_tokens(run)
    if origin is not None and origin.form == 1:
        return None, tokenizer.older_end_of_text
    known = tokenizer if origin is None else origin
    return known.begin_of_text, known.end_of_text


def prefix_of_texts(run: RunDir, data: Data) -> int | None:
    """Return the token before a text that is judged (lm-evaluation-harness, prefix_token_id).

    The bos_token of an export's tokenizer, or else its eos_token; None: it names neither.
    """
    files = companions_of_run(run)
    special = special_tokens(run, files, data)
    numbers = {text: number for number, text in _special_names(files).items()}
    for field in (BEGIN, END):
        carried = None if field in special.replaced else numbers.get(_named(files, field))
        number = special.own[field] if carried is None else carried
        if number is not None:
            return number
    return None


def exported(files: Files, described: Mapping[str, Any], replaced: frozenset[str], data: Data) -> Files:
    """Return the files of an export beside its weights and config.json.

    files: what belongs to the run. described: the config.json. data: the run's keys.
    replaced: see SpecialTokens; these fields, and those that are open, change in what came along.
    """
    out = {name: content for name, content in files.items() if name != CONFIG}
    special = {name: described[name] for name in ENDS if described.get(name) is not None}
    generation = object_of(out.get(GENERATION))
    changed = {
        name: value for name, value in special.items() if name in replaced or generation.get(name) is None
    }
    if GENERATION not in out:
        generation = {"_from_model_config": True}
    if "chat" in data.kinds:
        changed |= _with_stop_token(generation | changed, files)
    if GENERATION not in out or changed:
        out[GENERATION] = as_json(generation | changed)
    if TOKENIZER not in out and data.tokenizer == BYTES:
        out[TOKENIZER] = byte_tokenizer_json()
    if TOKENIZER in out:
        out |= _tokenizer_config(out, special, replaced, described)
    return out


def _with_stop_token(generation: Mapping[str, Any], files: Files) -> dict[str, Any]:
    """Return the ends of text with the token that ends an answer, which transformers asks nobody else for."""
    ends = [number for number in _as_list(generation.get(END)) if number is not None]
    stop, names = _named(files, END), _special_names(files)
    stops = [number for number, known in names.items() if known == stop and number not in ends]
    return {END: [*ends, *stops]} if stops else {}


def _named(files: Files, field: str) -> str | None:
    """Return the text of a special token, by tokenizer_config.json. field: of config.json."""
    return text_of_token(object_of(files.get(TOKENIZER_CONFIG)).get(field.removesuffix("_id")))


def _tokenizer_config(
    files: Files, special: Mapping[str, Any], replaced: frozenset[str], described: Mapping[str, Any]
) -> Files:
    """Return a tokenizer_config.json that names the special tokens; {}: there is one."""
    config = object_of(files.get(TOKENIZER_CONFIG))
    names = _special_names(files)
    changed = {}
    for field, value in special.items():
        key = field.removesuffix("_id")
        texts = [names[number] for number in _as_list(value) if number in names]
        if texts and (field in replaced or config.get(key) is None):
            changed[key] = texts[0]
    if TOKENIZER_CONFIG in files and not changed:
        return {}
    bare: dict[str, Any] = {"tokenizer_class": TOKENIZER_CLASS, "clean_up_tokenization_spaces": False}
    if length := length_of(described):
        bare["model_max_length"] = length
    return {TOKENIZER_CONFIG: as_json(bare | config | changed)}


def _special_names(files: Files) -> dict[int, str]:
    """Return the texts of a tokenizer.json's added tokens, by their numbers."""
    added = _as_list(object_of(files.get(TOKENIZER)).get("added_tokens"))
    tokens = [token for token in added if isinstance(token, dict) and isinstance(token.get("id"), int)]
    return {token["id"]: token["content"] for token in tokens if text_of_token(token)}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


# ---------------------------------------------------------------- reading


def _read(folder: Path, names: Iterable[str]) -> Files:
    """Return the files of a run's folder that are there; no links. Raises OSError."""
    if kind_of(folder) != "a folder":
        return {}
    there = [name for name in names if kind_of(folder / name) == "a file"]
    most = MOST_COMPANION_BYTES
    return {name: read_regular(folder / name, most, own=2 + name.count("/")) for name in there}


def _extends(content: bytes, before: bytes) -> bool:
    """Return whether a tokenizer has all tokens of another one, with the same numbers."""
    with suppress(ImportError, LibraryFailure):
        import tokenizers  # most runs use bytes, and don't pay for the import

        with library_calls():
            read = (tokenizers.Tokenizer.from_str(file.decode()) for file in (before, content))
            fewer, more = (tokenizer.get_vocab(with_added_tokens=True) for tokenizer in read)
            return bool(fewer) and fewer.items() <= more.items()
    return False

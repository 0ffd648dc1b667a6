"""A Hugging Face folder: config.json, safetensors files, the tokenizer's files. It may be a stranger's:
nothing outside of it is read, and nothing in it is run.

    config.json                          what model it is
    model.safetensors                    all tensors, or
    model.safetensors.index.json         which file has which tensor, and
    model-00001-of-00002.safetensors     those files
    tokenizer.json ...                   COMPANIONS
    additional_chat_templates/*.jinja    chat templates with names, of transformers

In the cache of Hugging Face's own programs the files are links into `blobs` beside the folder
`snapshots`, which are followed; no other link that leads out of the folder is.
"""

import os
import re
from collections import OrderedDict
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.errors import WeightsError
from mpitrain.inputs import closed_on_error, kind_of, listed, os_errors_as, read_file, shown
from mpitrain.weights.header import Entry, SafetensorsFile, parsed

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
# what comes along with the weights: the tokenizer, and how text is generated
COMPANIONS = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", GENERATION),
)
TEMPLATES = "additional_chat_templates"
MOST_TEMPLATES = 64
TEMPLATE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.jinja")
# what torch.compile, FSDP and checkpoint_wrapper write into the names of tensors, and DDP before each
WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
OF_DDP = "module."
MOST_CONFIG_BYTES = 1 << 20
MOST_INDEX_BYTES = 1 << 25  # DeepSeek-V3's has 9 MB; JSON takes up to 30 times its bytes in memory
MOST_COMPANION_BYTES = 1 << 27
MOST_NAMES = 10_000  # in a folder
MOST_SHARDS = 4_096
NUM_OPEN = 64  # files at once
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# of peft, which transformers applies where it finds them; of mlx, torchtune
ADAPTER = re.compile(r"adapter_config\.json|adapter_model[.-].*|adapters?_?[0-9]*\.(safetensors|npz|pt|bin)")
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
GIVE = "give the folder of a model, with its config.json and safetensors files"


class ModelFolder(AbstractContextManager):
    """A folder, open for reading. Owns its open files until close(); a context manager, too.

    config: the object of config.json.
    names: of all tensors, each with the file it is in.
    companions: names of the files that are there of COMPANIONS, and of TEMPLATES.
    wrappers: what the tensors' names in the files have besides, such as "_orig_mod.".
    Raises WeightsError for whatever is none, before any tensor is read.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._open: OrderedDict[str, SafetensorsFile] = OrderedDict()  # least recently used first
        self._there = self._list()
        self.config = self._object(CONFIG, MOST_CONFIG_BYTES)
        self.companions = tuple(name for name in COMPANIONS if name in self._there)
        self.companions += templates_in(self.path)
        self.wrappers: tuple[str, ...] = ()
        self._entries: dict[str, tuple[str, Entry]] = {}
        with closed_on_error(self):
            self._read_headers()
            self._unwrap()

    # ------------------------------------------------------------ tensors

    def entry(self, name: str) -> Entry:
        """Return dtype and shape of a tensor that is there."""
        return self._entries[name][1]

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Return rows [first, last) of a tensor in its own dtype. Raises WeightsError."""
        file, entry = self._entries[name]
        return self._file(file).rows(entry, first, last)

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ other files

    def content(self, name: str, most_bytes: int = MOST_COMPANION_BYTES) -> bytes:
        """Return a file of the folder. Raises WeightsError."""
        self._require_inside(name)
        with os_errors_as(WeightsError, self.where(name)):
            return read_file(self.path / name, most_bytes)

    def where(self, name: str) -> str:
        """Return the path of a file of the folder, for a message."""
        return str(shown(self.path / name))

    def _object(self, name: str, most_bytes: int) -> dict[str, Any]:
        content = self.content(name, most_bytes)
        try:
            return parsed(content, "it")
        except ValueError as error:
            raise self._error(name, str(error)) from None

    # ------------------------------------------------------------ what is there

    def _list(self) -> set[str]:
        try:
            kind = kind_of(Path(os.path.realpath(self.path)))
            if kind == "a folder":
                return self._scan()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "no folder can have this name"
            raise WeightsError(f"{shown(self.path)}: {why}; {GIVE}") from None
        if kind is None:
            fetch = "One of the hub is fetched by `hf download NAME --local-dir FOLDER`"
            raise WeightsError(f"{shown(self.path)}: no such folder; {GIVE}. {fetch}")
        raise WeightsError(f"{shown(self.path)} is {kind}; {GIVE}")

    def _scan(self) -> set[str]:
        names = set[str]()
        with os.scandir(self.path) as entries:
            for entry in entries:
                names.add(entry.name)
                if len(names) > MOST_NAMES:
                    raise WeightsError(f"{shown(self.path)}: more than {MOST_NAMES:,} files; {GIVE}")
        if adapters := sorted(name for name in names if ADAPTER.fullmatch(name)):
            raise WeightsError(
                f"{shown(self.path)}: {listed(adapters, 3)}: an adapter of a model (LoRA), which isn't read, "
                "and without it this is another model. Merge it by peft, merge_and_unload() and "
                "save_pretrained(OTHER), and give that folder; or move the adapter away for the bare model"
            )
        if CONFIG not in names:
            raise WeightsError(f"{shown(self.path)}: no {CONFIG}, which says what model it is; {GIVE}")
        return names

    def _read_headers(self) -> None:
        if SINGLE in self._there:
            self._entries = {name: (SINGLE, entry) for name, entry in self._file(SINGLE).entries.items()}
            return
        if INDEX not in self._there:
            raise self._without_weights()
        weight_map = self._weight_map()
        for file in dict.fromkeys(weight_map.values()):
            entries = self._file(file).entries
            for name, entry in entries.items():
                if weight_map.get(name) != file:
                    elsewhere = "in no file" if name not in weight_map else f"in {shown(weight_map[name])}"
                    raise self._error(file, f"it has {shown(name)}, which {INDEX} has {elsewhere}")
                self._entries[name] = (file, entry)
        if lost := sorted(weight_map.keys() - self._entries.keys()):
            raise self._error(weight_map[lost[0]], f"it lacks {listed(lost, 3)}, which {INDEX} has there")

    def _unwrap(self) -> None:
        """Name the tensors as the model does that was saved in a wrapper of torch's."""
        names = {name: WRAPPERS.sub("", name) for name in self._entries}
        wrappers = {f"{wrapper}." for name in names for wrapper in WRAPPERS.findall(name)}
        if names and all(name.startswith(OF_DDP) for name in names.values()):
            names = {name: bare.removeprefix(OF_DDP) for name, bare in names.items()}
            wrappers.add(OF_DDP)
        if len(set(names.values())) < len(names):
            twice = sorted(names, key=lambda name: (names[name], name))
            such = f"tensors with and without {listed(sorted(wrappers))}, such as {shown(twice[0])}"
            what = f"{such}, are of two models"
            raise WeightsError(f"{shown(self.path)}: {what}; save only the model to import")
        self.wrappers = tuple(sorted(wrappers))
        self._entries = {names[name]: entry for name, entry in self._entries.items()}
        self.names = {name: file for name, (file, _) in self._entries.items()}

    def _weight_map(self) -> dict[str, str]:
        """Return which file has which tensor: files of this folder alone."""
        weight_map = self._object(INDEX, MOST_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise self._error(INDEX, "weight_map is missing, or no object of names of files")
        files = dict.fromkeys(weight_map.values())
        if len(files) > MOST_SHARDS:
            raise self._error(INDEX, f"it names {len(files):,} files, at most {MOST_SHARDS:,} are read")
        for file in files:
            is_shard = SHARD.fullmatch(file)
            if not is_shard or file not in self._there:
                fault = "is missing" if is_shard else "is no safetensors file of this folder"
                raise self._error(INDEX, f"it names {shown(file)}, which {fault}")
        return weight_map

    def _without_weights(self) -> WeightsError:
        pickles = sorted(name for name in self._there if name.endswith(PICKLES))
        if pickles:
            return WeightsError(
                f"{shown(self.path)}: {listed(pickles, 3)}, but no safetensors file. A pickle runs code when "
                "it is read, and isn't read here: have transformers write safetensors, where you trust it: "
                "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)"
            )
        others = sorted(name for name in self._there if name.endswith(".safetensors"))
        if others:
            what = f"{listed(others, 3)}, but neither {SINGLE} nor {INDEX}"
            return WeightsError(f"{shown(self.path)}: {what}; get what is missing")
        return WeightsError(f"{shown(self.path)}: no safetensors file; {GIVE}")

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._open:
            self._require_inside(name)
            self._open[name] = SafetensorsFile(self.path / name)
            if len(self._open) > NUM_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(name)
        return self._open[name]

    def _require_inside(self, name: str) -> None:
        """Raise WeightsError for a link that leads out of the folder, but for those of the hub's cache."""
        folder = Path(os.path.realpath(self.path))
        real = Path(os.path.realpath(folder / name))
        roots = [folder]
        if folder.parent.name == "snapshots":
            roots.append(folder.parent.parent / "blobs")
        if not any(real.is_relative_to(root) for root in roots):
            raise self._error(name, "it is a link that leads out of the folder; put the file itself there")

    def _error(self, name: str, what: str) -> WeightsError:
        return WeightsError(f"{self.where(name)}: {what}")


def templates_in(folder: Path) -> tuple[str, ...]:
    """Return the names of a folder's further chat templates, with that of the folder they lie in."""
    try:
        names = sorted(os.listdir(folder / TEMPLATES))
    except OSError:
        return ()
    known = [f"{TEMPLATES}/{name}" for name in names if TEMPLATE.fullmatch(name)]
    return tuple(known[:MOST_TEMPLATES])

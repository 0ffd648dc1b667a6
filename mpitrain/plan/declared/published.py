"""Public models by name, each with its source: `mpitrain plan backtest` predicts the steps of all of them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mpitrain.config import AttentionTable, Config, Data, ExpertsTable, Model
from mpitrain.errors import ConfigError, nearest
from mpitrain.inputs import shown

Keys = Mapping[str, Any]


class PublishedModel(NamedTuple):
    """A model by the keys of three tables that say what it is, over those of its preset."""

    name: str
    model: Keys
    attention: Keys = {}
    experts: Keys = {}
    source: str = ""

    def configuration(self, sequence: int) -> Config:
        """Return a configuration of the model, for sequences of a length."""
        model = dict(self.model)
        if "positions" in model:
            model["positions"] = max(sequence, model["positions"])
        return Config(
            model=Model(**model),
            attention=AttentionTable(**self.attention),
            experts=ExpertsTable(**self.experts),
            data=Data(sequence=sequence),
        )


_PTD = "arXiv:2104.04473, table 1"
_KORTHIKANTI = "arXiv:2205.05198, table 3"
_ZERO_BUBBLE = "arXiv:2401.10241, table 3; vocabulary of GPT-2, padded"
_PLAYBOOK = "Ultra-Scale Playbook, nanotron benchmark; sizes follow from the parameters that are named"
_FOLDED = "arXiv:2504.14960, section 4.1"
# like GPT-2, with hidden units of four widths, and the dropout that these were trained with: blocks, width,
# heads, vocabulary, source
_GPTS = {
    "gpt-7.5b": (36, 4096, 32, 51200, _PTD),
    "gpt-18.4b": (40, 6144, 48, 51200, _PTD),
    "gpt-39.1b": (48, 8192, 64, 51200, _PTD),
    "gpt-76.1b": (60, 10240, 80, 51200, _PTD),
    "gpt-145.6b": (80, 12288, 96, 51200, _PTD),
    "gpt-310.1b": (96, 16384, 128, 51200, _PTD),
    "gpt-529.6b": (105, 20480, 128, 51200, _PTD),
    "gpt-1008.0b": (128, 25600, 160, 51200, _PTD),
    "gpt-1.7b": (24, 2304, 24, 51200, _PTD),
    "gpt-3.6b": (30, 3072, 32, 51200, _PTD),
    "gpt-22b": (48, 6144, 64, 51200, _KORTHIKANTI),
    "gpt-530b": (105, 20480, 128, 51200, _KORTHIKANTI),
    "gpt-1t": (128, 25600, 160, 51200, _KORTHIKANTI),
    "gpt-175b": (96, 12288, 96, 51200, "arXiv:2005.14165, table 2.1"),
    "gpt-174.6b": (96, 12288, 96, 51200, "arXiv:2104.04473, table 2"),
    "gpt-1.5b": (22, 2304, 24, 50304, _ZERO_BUBBLE),
    "gpt-6.2b": (30, 4096, 32, 50304, _ZERO_BUBBLE),
    "gpt-14.6b": (46, 5120, 40, 50304, _ZERO_BUBBLE),
    "gpt-28.3b": (62, 6144, 48, 50304, _ZERO_BUBBLE),
    "gpt-98.5b": (78, 10240, 80, 50304, "arXiv:2405.15362, table 3"),
    "bloom-176b": (70, 14336, 112, 250880, "arXiv:2211.05100, table 3"),
}
# with a gate: blocks, width, heads, key-value heads, hidden units, vocabulary; other keys
_LLAMAS: dict[str, tuple[tuple[int, ...], str, dict[str, Keys]]] = {
    "llama-1.34b": ((16, 2048, 32, 32, 8192, 131072), _PLAYBOOK, dict(model=dict(tied=True))),
    "llama-3.57b": ((28, 3072, 24, 24, 8192, 131072), _PLAYBOOK, dict(model=dict(tied=True))),
    "llama-8.86b": ((32, 4096, 32, 32, 14336, 131072), _PLAYBOOK, {}),
    "llama-80b": ((80, 8192, 64, 64, 28672, 131072), _PLAYBOOK, {}),
    # its feed-forward has two products with 73,728 hidden units: as many weights as three of 49,152
    "nemotron-4-340b": (
        (96, 18432, 96, 8, 49152, 256000), "arXiv:2406.11704, table 1", dict(attention=dict(head_width=192)),
    ),
    "mixtral-8x22b-g8t8": (
        (56, 6144, 48, 8, 16384, 32000), _FOLDED,
        dict(model=dict(family="mixtral"), experts=dict(count=64, active=8, width=2048)),
    ),
    "llama3-8x70b": (
        (80, 8192, 64, 8, 28672, 128256), _FOLDED,
        dict(model=dict(family="mixtral"), experts=dict(count=8, active=2, width=28672)),
    ),
    "qwen2-57b-a14b": (
        (28, 3584, 28, 4, 18944, 151936), "Qwen/Qwen2-57B-A14B config.json",
        dict(model=dict(family="glm-4.5"), experts=dict(count=64, active=8, width=2560, shared=8, first=0)),
    ),
}  # fmt: skip
_PRESETS = {
    **dict.fromkeys(("llama2-7b", "llama2-13b", "llama2-70b"), "arXiv:2307.09288"),
    "llama3.2-1b": "meta-llama/Llama-3.2-1B config.json",
    **dict.fromkeys(("llama3-8b", "llama3-70b"), "arXiv:2407.21783, table 3"),
    **dict.fromkeys(("olmo2-7b", "olmo2-13b"), "arXiv:2501.00656, table 3"),
    "gemma2-27b": "arXiv:2408.00118, table 1",
    "mistral-7b": "arXiv:2310.06825, table 1",
    "mixtral-8x7b": "arXiv:2401.04088, table 1",
    "mixtral-8x22b": "huggingface.co/mistralai/Mixtral-8x22B-v0.1 config.json",
    **dict.fromkeys(("qwen3-30b-a3b", "qwen3-235b-a22b"), "arXiv:2505.09388, table 2"),
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), "arXiv:2508.10925, table 1"),
    "deepseek-v3": "arXiv:2412.19437, section 4.2",
}
_OTHERS = (
    PublishedModel("llama3-405b", dict(preset="llama3.1-405b"), source="arXiv:2407.21783, table 3"),
    PublishedModel(
        "deepseek-v2", dict(preset="deepseek-v3", layers=60, width=5120, ffn=12288, vocab=102400),
        experts=dict(count=160, active=6, width=1536, shared=2, first=1, groups=8, groups_active=3),
        source="arXiv:2405.04434, section 3.1.2",
    ),
)  # fmt: skip


def _published() -> Iterator[PublishedModel]:
    for name, (layers, width, heads, vocab, source) in _GPTS.items():
        sizes = dict(layers=layers, width=width, heads=heads, ffn=4 * width, vocab=vocab, tied=True)
        yield PublishedModel(
            name, dict(family="gpt2", positions=2048, residual_dropout=0.1, **sizes), source=source
        )
    for name, (numbers, source, other) in _LLAMAS.items():
        sizes = dict(zip(("layers", "width", "heads", "kv_heads", "ffn", "vocab"), numbers))
        model = {"family": "llama", "tied": False, **sizes, **other.get("model", {})}
        yield PublishedModel(name, source=source, **{**other, "model": model})
    yield from (PublishedModel(name, dict(preset=name), source=source) for name, source in _PRESETS.items())
    yield from _OTHERS


PUBLISHED = {model.name: model for model in _published()}
# names that tables of measurements have instead, by the letters and digits that are left of them
_ALIASES = {
    "gpt3175b": "gpt-175b", "gpt3": "gpt-175b", "gpt530b": "gpt-530b", "gpt1t": "gpt-1t",
    "llama31405b": "llama3-405b", "llama318b": "llama3-8b", "llama3170b": "llama3-70b",
    "llama3405b": "llama3-405b", "bloom": "bloom-176b", "nemotron4340b": "nemotron-4-340b",
    "gptoss120b": "gpt-oss-120b",
}  # fmt: skip
NOT_A_TRANSFORMER = {"nemotron3nano": "its blocks are mostly Mamba-2, of which no cost is known here"}


def _letters(name: str) -> str:
    """Return letters and digits of a model's name, without brackets and `like`."""
    return re.sub(r"\(.*?\)|-?like|[^a-z0-9.]", "", name.lower()).replace(".", "")


_BY_LETTERS = {_letters(name): name for name in PUBLISHED} | _ALIASES


def find_published(name: str) -> PublishedModel:
    """Return a public model by its name, however it is spelt. Raises ConfigError with the nearest."""
    letters = _letters(name)
    if letters in NOT_A_TRANSFORMER:
        raise ConfigError(f"model {shown(name)}: {NOT_A_TRANSFORMER[letters]}; leave it out")
    if letters in _BY_LETTERS:
        return PUBLISHED[_BY_LETTERS[letters]]
    near = nearest(letters, _BY_LETTERS)
    hint = f"did you mean {_BY_LETTERS[near]}? " if near else ""
    raise ConfigError(
        f"model {shown(name)}: found no public model of this name; {hint}needed layers, width, "
        "heads, ffn and vocabulary, or one of the registry (mpitrain/plan/declared/published.py)"
    )

"""Public models by name, each with its source: presets of families, and sizes that tables of
measurements are about.

`mpitrain plan backtest` predicts the steps of all of them.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mpitrain.config import AttentionTable, Config, Data, ExpertsTable, Model
from mpitrain.errors import ConfigError, nearest
from mpitrain.inputs import shown

Keys = Mapping[str, Any]


class PublishedModel(NamedTuple):
    """A model by the keys that say what it is, over those of its preset.

    model, attention, experts: keys of these tables.
    """

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


def _preset(name: str, source: str, preset: str = "") -> PublishedModel:
    return PublishedModel(name, dict(preset=preset or name), source=source)


def _gpt(name: str, layers: int, width: int, heads: int, vocab: int, source: str) -> PublishedModel:
    """Return a GPT-2-like model of four widths, with the dropout that these were trained with."""
    sizes = dict(layers=layers, width=width, heads=heads, ffn=4 * width, vocab=vocab, tied=True)
    return PublishedModel(
        name, dict(family="gpt2", positions=2048, residual_dropout=0.1, **sizes), source=source
    )


def _llama(
    name: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    source: str,
    *,
    tied: bool = False,
    family: str = "llama",
    **tables: Keys,
) -> PublishedModel:
    sizes = dict(layers=layers, width=width, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab)
    return PublishedModel(name, dict(family=family, tied=tied, **sizes), source=source, **tables)


_PTD = "arXiv:2104.04473, table 1"
_KORTHIKANTI = "arXiv:2205.05198, table 3"
_ZERO_BUBBLE = "arXiv:2401.10241, table 3; vocabulary of GPT-2, padded"
_PLAYBOOK = "Ultra-Scale Playbook, nanotron benchmark; sizes follow from the parameters that are named"
_LLAMA2 = "arXiv:2307.09288"
_LLAMA3 = "arXiv:2407.21783, table 3"
_FOLDED = "arXiv:2504.14960, section 4.1"


def _gpts() -> Iterator[PublishedModel]:
    sizes = (
        (36, 4096, 32, "7.5B"),
        (40, 6144, 48, "18.4B"),
        (48, 8192, 64, "39.1B"),
        (60, 10240, 80, "76.1B"),
    )
    larger = ((80, 12288, 96, "145.6B"), (96, 16384, 128, "310.1B"), (105, 20480, 128, "529.6B"))
    largest = ((128, 25600, 160, "1008.0B"), (24, 2304, 24, "1.7B"), (30, 3072, 32, "3.6B"))
    for layers, width, heads, label in (*sizes, *larger, *largest):
        yield _gpt(f"gpt-{label.lower()}", layers, width, heads, 51200, _PTD)
    for layers, width, heads, label in (
        (48, 6144, 64, "22b"),
        (105, 20480, 128, "530b"),
        (128, 25600, 160, "1t"),
    ):
        yield _gpt(f"gpt-{label}", layers, width, heads, 51200, _KORTHIKANTI)
    yield _gpt("gpt-175b", 96, 12288, 96, 51200, "arXiv:2005.14165, table 2.1")
    yield _gpt("gpt-174.6b", 96, 12288, 96, 51200, "arXiv:2104.04473, table 2")
    for layers, width, heads, label in (
        (22, 2304, 24, "1.5b"),
        (30, 4096, 32, "6.2b"),
        (46, 5120, 40, "14.6b"),
    ):
        yield _gpt(f"gpt-{label}", layers, width, heads, 50304, _ZERO_BUBBLE)
    yield _gpt("gpt-28.3b", 62, 6144, 48, 50304, _ZERO_BUBBLE)
    yield _gpt("gpt-98.5b", 78, 10240, 80, 50304, "arXiv:2405.15362, table 3")
    yield _gpt("bloom-176b", 70, 14336, 112, 250880, "arXiv:2211.05100, table 3")


def _llamas() -> Iterator[PublishedModel]:
    yield _llama("llama-1.34b", 16, 2048, 32, 32, 8192, 131072, _PLAYBOOK, tied=True)
    yield _llama("llama-3.57b", 28, 3072, 24, 24, 8192, 131072, _PLAYBOOK, tied=True)
    yield _llama("llama-8.86b", 32, 4096, 32, 32, 14336, 131072, _PLAYBOOK)
    yield _llama("llama-80b", 80, 8192, 64, 64, 28672, 131072, _PLAYBOOK)
    for name in ("llama2-7b", "llama2-13b", "llama2-70b"):
        yield _preset(name, _LLAMA2)
    yield _preset("llama3.2-1b", "meta-llama/Llama-3.2-1B config.json")
    for name in ("llama3-8b", "llama3-70b"):
        yield _preset(name, _LLAMA3)
    yield _preset("llama3-405b", _LLAMA3, "llama3.1-405b")
    yield _preset("olmo2-7b", "arXiv:2501.00656, table 3")
    yield _preset("olmo2-13b", "arXiv:2501.00656, table 3")
    yield _preset("gemma2-27b", "arXiv:2408.00118, table 1")
    yield _preset("mistral-7b", "arXiv:2310.06825, table 1")
    # its feed-forward has two products with 73,728 hidden units: as many weights as three of 49,152
    yield _llama(
        "nemotron-4-340b", 96, 18432, 96, 8, 49152, 256000, "arXiv:2406.11704, table 1",
        attention=dict(head_width=192),
    )  # fmt: skip


def _mixtures() -> Iterator[PublishedModel]:
    yield _preset("mixtral-8x7b", "arXiv:2401.04088, table 1")
    yield _preset("mixtral-8x22b", "huggingface.co/mistralai/Mixtral-8x22B-v0.1 config.json")
    yield _llama(
        "mixtral-8x22b-g8t8", 56, 6144, 48, 8, 16384, 32000, _FOLDED, family="mixtral",
        experts=dict(count=64, active=8, width=2048),
    )  # fmt: skip
    yield _llama(
        "llama3-8x70b", 80, 8192, 64, 8, 28672, 128256, _FOLDED, family="mixtral",
        experts=dict(count=8, active=2, width=28672),
    )  # fmt: skip
    yield _llama(
        "qwen2-57b-a14b", 28, 3584, 28, 4, 18944, 151936, "Qwen/Qwen2-57B-A14B config.json", family="glm-4.5",
        experts=dict(count=64, active=8, width=2560, shared=8, first=0),
    )  # fmt: skip
    for name in ("qwen3-30b-a3b", "qwen3-235b-a22b"):
        yield _preset(name, "arXiv:2505.09388, table 2")
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        yield _preset(name, "arXiv:2508.10925, table 1")
    yield _preset("deepseek-v3", "arXiv:2412.19437, section 4.2")
    yield PublishedModel(
        "deepseek-v2",
        dict(preset="deepseek-v3", layers=60, width=5120, ffn=12288, vocab=102400),
        experts=dict(count=160, active=6, width=1536, shared=2, first=1, groups=8, groups_active=3),
        source="arXiv:2405.04434, section 3.1.2",
    )


PUBLISHED = {model.name: model for model in (*_gpts(), *_llamas(), *_mixtures())}
# names that tables of measurements have instead, by the letters and digits that are left of them
_ALIASES = {
    "gpt3175b": "gpt-175b", "gpt3": "gpt-175b", "gpt530b": "gpt-530b", "gpt1t": "gpt-1t",
    "llama31405b": "llama3-405b", "llama318b": "llama3-8b", "llama3170b": "llama3-70b",
    "llama3405b": "llama3-405b", "bloom": "bloom-176b", "nemotron4340b": "nemotron-4-340b",
    "gptoss120b": "gpt-oss-120b",
}  # fmt: skip
NOT_A_TRANSFORMER = {"nemotron3nano": "its blocks are mostly Mamba-2, of which no cost is known here"}


def _letters(name: str) -> str:
    """Return the letters and digits of a model's name, without what is in brackets or says `like`."""
    return re.sub(r"\(.*?\)|-?like|[^a-z0-9.]", "", name.lower()).replace(".", "")


_BY_LETTERS = {_letters(name): name for name in PUBLISHED} | _ALIASES


def find_published(name: str) -> PublishedModel:
    """Return a public model by its name, however it is spelt.

    Raises ConfigError for one that isn't known, with the nearest.
    """
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

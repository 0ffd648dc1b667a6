"""Public models: shapes by name, each with its source.

Presets of families, `mpitrain plan` and its back-test share them. Models whose family is "" can be
planned and back-tested; no family here trains them.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.inputs import shown


class Latent(NamedTuple):
    """Latent attention (arXiv:2405.04434, section 2.1): widths of what heads are made of."""

    q_rank: int
    kv_rank: int
    rotary_width: int
    value_width: int


class RoutedExperts(NamedTuple):
    """Experts of a block. width: hidden units of one. shared: experts that every token meets.

    first: blocks at the beginning that have a dense feed-forward instead.
    groups: of experts, of which a token's experts are in groups_active.
    """

    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls; the key's name
    active: int
    width: int
    shared: int = 0
    first: int = 0
    groups: int = 1
    groups_active: int = 1


class ModelShape(NamedTuple):
    """Sizes of a transformer; from these follow parameters, FLOPs, bytes and traffic.

    gated: the feed-forward has three products, not two. biased: products and norms have biases.
    positions: learned positions, 0 for none.
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    biased: bool = False
    positions: int = 0
    window: int = 0
    experts: RoutedExperts | None = None
    latent: Latent | None = None
    family: str = ""
    source: str = ""

    @property
    def num_sparse(self) -> int:
        """Blocks with experts."""
        return self.layers - self.experts.first if self.experts else 0

    def attention_parameters(self) -> int:
        """Return the weights of one block's attention, norm and biases included."""
        if self.latent is not None:
            return self._latent_parameters(self.latent)
        features = self.heads * self.head_width
        kv_features = self.kv_heads * self.head_width
        weights = self.width * (2 * features + 2 * kv_features) + self.width
        return weights + (features + 2 * kv_features + 2 * self.width) * self.biased

    def _latent_parameters(self, latent: Latent) -> int:
        q_rank, kv_rank, rotary, value = latent
        queries = self.heads * (self.head_width + rotary)
        of_queries = self.width * q_rank + q_rank * queries + q_rank if q_rank else self.width * queries
        of_keys = self.width * (kv_rank + rotary) + kv_rank * self.heads * (self.head_width + value) + kv_rank
        return of_queries + of_keys + self.heads * value * self.width + self.width

    def dense_parameters(self) -> int:
        """Return the weights of one dense feed-forward, norm and biases included."""
        weights = (3 if self.gated else 2) * self.width * self.ffn + self.width
        return weights + (self.ffn + 2 * self.width) * self.biased

    def expert_parameters(self) -> int:
        """Return the weights of one expert."""
        return 3 * self.width * self.experts.width if self.experts else 0

    def shared_parameters(self) -> int:
        """Return the weights of a sparse block's feed-forward that every token meets: router, shared
        experts, norm.
        """
        experts = self.experts
        if experts is None:
            return 0
        return self.width * experts.count + experts.shared * self.expert_parameters() + self.width

    def end_parameters(self) -> int:
        """Return the weights of embedding, positions, last norm and head."""
        ends = 1 if self.tied else 2
        return ends * self.vocab * self.width + (self.positions + 1 + self.biased) * self.width

    def parameters(self) -> int:
        """Return all weights."""
        of_experts = self.experts.count * self.expert_parameters() if self.experts else 0
        return self._body(of_experts) + self.end_parameters()

    def active_parameters(self) -> int:
        """Return the weights that a token is multiplied with: of its experts only, without the lookup."""
        of_experts = self.experts.active * self.expert_parameters() if self.experts else 0
        return self._body(of_experts) + self.vocab * self.width

    def _body(self, of_experts: int) -> int:
        sparse = self.num_sparse
        dense = self.layers - sparse
        blocks = self.layers * self.attention_parameters() + dense * self.dense_parameters()
        return blocks + sparse * (self.shared_parameters() + of_experts)

    def score_width(self) -> int:
        """Return the features of all heads that scores and results are made of, together."""
        if self.latent is not None:
            return self.heads * (self.head_width + self.latent.rotary_width + self.latent.value_width)
        return 2 * self.heads * self.head_width

    def flops_per_token(self, sequence: int, halved: bool = True) -> float:
        """Return the model FLOPs of a token in a training step: 6 a weight, and attention's core.

        halved: what is masked of causal attention isn't counted (PaLM, arXiv:2204.02311, appendix
        B, counts all of it).
        """
        seen: float = min(self.window or sequence, sequence)
        seen = seen * (1 - seen / (2 * sequence)) if halved else seen
        return 6.0 * self.active_parameters() + 6.0 * self.layers * self.score_width() * seen

    def preset(self) -> dict[str, int | bool]:
        """Return the keys of the configuration's table `model`."""
        return dict(
            layers=self.layers, width=self.width, heads=self.heads, kv_heads=self.kv_heads, ffn=self.ffn,
            vocab=self.vocab, tied=self.tied,
        )  # fmt: skip


def _gpt(
    name: str,
    layers: int,
    width: int,
    heads: int,
    vocab: int,
    source: str,
    **more: Any,
) -> ModelShape:
    """Return a GPT-2-like shape (plain feed-forward of four widths, biases, learned positions)."""
    return ModelShape(
        name, layers, width, heads, heads, width // heads, 4 * width, vocab,
        gated=False, tied=True, biased=True, positions=2048, source=source, **more,
    )  # fmt: skip


def _llama(
    name: str,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    source: str,
    **more: Any,
) -> ModelShape:
    return ModelShape(
        name, layers, width, heads, kv_heads, more.pop("head_width", width // heads), ffn, vocab,
        source=source, **more,
    )  # fmt: skip


_PTD = "arXiv:2104.04473, table 1"
_KORTHIKANTI = "arXiv:2205.05198, table 3"
_ZERO_BUBBLE = "arXiv:2401.10241, table 3; vocabulary of GPT-2, padded"
_PLAYBOOK = "Ultra-Scale Playbook, nanotron benchmark; sizes follow from the parameters that are named"
_LLAMA3 = "arXiv:2407.21783, table 3"


def _of_gpts() -> Iterator[ModelShape]:
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
    yield ModelShape(
        "nemotron-4-340b",
        96,
        18432,
        96,
        8,
        192,
        73728,
        256000,
        gated=False,
        source="arXiv:2406.11704, table 1",
    )


def _of_llamas() -> Iterator[ModelShape]:
    yield _llama("llama-1.34b", 16, 2048, 32, 32, 8192, 131072, _PLAYBOOK, tied=True)
    yield _llama("llama-3.57b", 28, 3072, 24, 24, 8192, 131072, _PLAYBOOK, tied=True)
    yield _llama("llama-8.86b", 32, 4096, 32, 32, 14336, 131072, _PLAYBOOK)
    yield _llama("llama-80b", 80, 8192, 64, 64, 28672, 131072, _PLAYBOOK)
    yield _llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000, "arXiv:2307.09288", family="llama")
    yield _llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000, "arXiv:2307.09288", family="llama")
    yield _llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000, "arXiv:2307.09288", family="llama")
    yield _llama(
        "llama3.2-1b", 16, 2048, 32, 8, 8192, 128256, "meta-llama/Llama-3.2-1B config.json", tied=True,
        family="llama",
    )  # fmt: skip
    yield _llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256, _LLAMA3, family="llama")
    yield _llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256, _LLAMA3, family="llama")
    yield _llama("llama3-405b", 126, 16384, 128, 8, 53248, 128256, _LLAMA3, family="llama")
    yield _llama("olmo2-7b", 32, 4096, 32, 32, 11008, 100352, "arXiv:2501.00656, table 3")
    yield _llama("olmo2-13b", 40, 5120, 40, 40, 13824, 100352, "arXiv:2501.00656, table 3")
    yield _llama(
        "gemma2-27b", 46, 4608, 32, 16, 36864, 256128, "arXiv:2408.00118, table 1",
        head_width=128, tied=True,
    )  # fmt: skip
    yield _llama("mistral-7b", 32, 4096, 32, 8, 14336, 32000, "arXiv:2310.06825, table 1", window=4096)


def _of_mixtures() -> Iterator[ModelShape]:
    mixtral = "arXiv:2401.04088, table 1"
    big = "huggingface.co/mistralai/Mixtral-8x22B-v0.1 config.json"
    yield _llama(
        "mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, mixtral, experts=RoutedExperts(8, 2, 14336),
        family="mixtral",
    )  # fmt: skip
    yield _llama(
        "mixtral-8x22b",
        56,
        6144,
        48,
        8,
        16384,
        32000,
        big,
        experts=RoutedExperts(8, 2, 16384),
        family="mixtral",
    )
    yield _llama(
        "mixtral-8x22b-g8t8", 56, 6144, 48, 8, 16384, 32000, "arXiv:2504.14960, section 4.1",
        experts=RoutedExperts(64, 8, 2048),
    )  # fmt: skip
    yield _llama(
        "llama3-8x70b", 80, 8192, 64, 8, 28672, 128256, "arXiv:2504.14960, section 4.1",
        experts=RoutedExperts(8, 2, 28672),
    )  # fmt: skip
    yield _llama(
        "qwen2-57b-a14b", 28, 3584, 28, 4, 18944, 151936, "Qwen/Qwen2-57B-A14B config.json",
        experts=RoutedExperts(64, 8, 2560, shared=8),
    )  # fmt: skip
    yield _llama(
        "qwen3-30b-a3b", 48, 2048, 32, 4, 6144, 151936, "arXiv:2505.09388, table 2", head_width=128,
        experts=RoutedExperts(128, 8, 768), family="qwen3-moe",
    )  # fmt: skip
    yield _llama(
        "qwen3-235b-a22b", 94, 4096, 64, 4, 12288, 151936, "arXiv:2505.09388, table 2", head_width=128,
        experts=RoutedExperts(128, 8, 1536), family="qwen3-moe",
    )  # fmt: skip
    yield _llama(
        "gpt-oss-120b", 36, 2880, 64, 8, 2880, 201088, "arXiv:2508.10925, table 1", head_width=64,
        experts=RoutedExperts(128, 4, 2880), family="gpt-oss", window=0,
    )  # fmt: skip
    yield _llama(
        "gpt-oss-20b", 24, 2880, 64, 8, 2880, 201088, "arXiv:2508.10925, table 1", head_width=64,
        experts=RoutedExperts(32, 4, 2880), family="gpt-oss",
    )  # fmt: skip
    yield ModelShape(
        "deepseek-v3", 61, 7168, 128, 128, 128, 18432, 129280, latent=Latent(1536, 512, 64, 128),
        experts=RoutedExperts(256, 8, 2048, shared=1, first=3, groups=8, groups_active=4),
        family="deepseek-v3", source="arXiv:2412.19437, section 4.2",
    )  # fmt: skip
    yield ModelShape(
        "deepseek-v2", 60, 5120, 128, 128, 128, 12288, 102400, latent=Latent(1536, 512, 64, 128),
        experts=RoutedExperts(160, 6, 1536, shared=2, first=1), source="arXiv:2405.04434, section 3.1.2",
    )  # fmt: skip


PUBLISHED = {shape.name: shape for shape in (*_of_gpts(), *_of_llamas(), *_of_mixtures())}
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


def find_published(name: str) -> ModelShape:
    """Return a public model by its name, however it is spelt.

    Raises ConfigError for one that isn't known, with the nearest.
    """
    letters = _letters(name)
    if letters in NOT_A_TRANSFORMER:
        raise ConfigError(f"model {shown(name)}: {NOT_A_TRANSFORMER[letters]}; leave it out")
    if letters in _BY_LETTERS:
        return PUBLISHED[_BY_LETTERS[letters]]
    near = get_close_matches(letters, _BY_LETTERS, n=1)
    hint = f"did you mean {_BY_LETTERS[near[0]]}? " if near else ""
    raise ConfigError(
        f"model {shown(name)}: found no public model of this name; {hint}needed layers, width, heads, ffn "
        "and vocabulary, or one of the registry (mpitrain/plan/declared/published.py)"
    )

"""Tokenize a corpus on all ranks: rank 0 reads text and tokenizer and writes tokens; all encode."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from mpitrain.comm.base.world import World
from mpitrain.config import Data
from mpitrain.data.encoding import SHARE_BYTES, Encoder, LocalEncoder, Texts
from mpitrain.data.memory_left import available_bytes
from mpitrain.data.tokenizer import Tokenizer, Vocabulary, tokenizer_from, vocabulary_of

# For each rank that takes part: less is encoded sooner than a tokenizer is sent and read.
LEAST_SHARES = 4
# more than rank 0 can read text for
MOST_RANKS = 64


class OneTokenizer:
    """The tokenizer of a run, which rank 0 has. Others get its numbers, and its files if they encode."""

    def __init__(self, world: World, data: Data):
        self._world = world
        self._data = data
        self._tokenizer: Tokenizer | None = None

    def read(self, read: Callable[[], Tokenizer]) -> Vocabulary:
        """Have rank 0 read it; return its numbers. Collective; an InputError of rank 0 is raised on all."""
        return self._world.on_first_rank("reading the tokenizer", lambda: vocabulary_of(self._take(read())))

    def _take(self, tokenizer: Tokenizer) -> Tokenizer:
        self._tokenizer = tokenizer
        return tokenizer

    @property
    def whole(self) -> Tokenizer:
        """The tokenizer itself, on rank 0."""
        if self._tokenizer is None:
            raise TypeError("this rank has no tokenizer")
        return self._tokenizer

    def encoder(self, tokenizer: Tokenizer, num_bytes: int) -> Encoder:
        """Return what encodes so many bytes, on rank 0, within on_first_rank() with help()."""
        ranks = _ranks_to_help(self._world, tokenizer, num_bytes)
        return _OnRanks(self._world, ranks, tokenizer.files()) if len(ranks) > 1 else LocalEncoder(tokenizer)

    def help(self, item: Mapping[str, bytes] | Texts) -> Iterator[np.ndarray]:
        """Do this rank's part of World.share(): read a tokenizer from its files, or encode texts."""
        if isinstance(item, Mapping):
            self._tokenizer = tokenizer_from(item, self._data)
        else:
            yield from map(self.whole.encode, item)


class _OnRanks:
    def __init__(self, world: World, ranks: Sequence[int], files: Mapping[str, bytes]):
        self._world = world
        self._ranks = ranks
        self._files = files
        self.num_ranks = len(ranks)

    def __call__(self, shares: Iterable[Texts]) -> Iterator[list[np.ndarray]]:
        return self._world.share(shares, self._ranks, self._files)


def _ranks_to_help(world: World, tokenizer: Tokenizer, num_bytes: int) -> list[int]:
    """Return the ranks that have memory for a tokenizer, and enough to do: the first ones of each node."""
    if not tokenizer.memory:  # bytes: there is nothing to encode
        return [0]
    of_node = world.node_ranks or world.size
    rank_bytes = tokenizer.memory + SHARE_BYTES * tokenizer.memory_per_byte
    free_bytes = available_bytes()
    fit = of_node if free_bytes is None else free_bytes // 2 // rank_bytes
    able = [rank for rank in range(world.size) if rank == 0 or rank % of_node < fit]
    return able[: min(MOST_RANKS, max(1, num_bytes // (LEAST_SHARES * SHARE_BYTES)))]

"""Which positions of a sequence each rank of the cp axis holds, and which of its queries see which keys.

A causal query sees the keys at its own position and before. With contiguous pieces (`plain`) the
last rank has nearly twice the mean work; with two chunks per rank, one early and one late
(`zigzag`), all have the same. T positions on c ranks, t = T/c on each:

    plain    4 ranks   0 0 1 1 2 2 3 3      rank r holds [r t, (r+1) t)
    zigzag   4 ranks   0 1 2 3 3 2 1 0      rank r holds chunks r and 2c-1-r of 2c

Source of zigzag: Llama 3 (arXiv:2407.21783, section 3.3.2); the imbalance: striped attention
(arXiv:2311.09431). Integers only here.
"""

from dataclasses import dataclass

import numpy as np

from mpitrain.errors import ConfigError

PLACEMENTS = ("plain", "zigzag")
# by parallel.context
OF_KIND = {"ring": "plain", "zigzag": "zigzag", "gather": "zigzag", "ulysses": "plain"}


@dataclass(frozen=True)
class Tile:
    """Some queries against some keys, each a slice of what is held.

    causal: it is the diagonal, where both are the same positions, and no query sees a later key.
    """

    queries: slice
    keys: slice
    causal: bool = False

    @property
    def num_pairs(self) -> int:
        """How many (query, key) pairs see each other: what the tile costs."""
        num_queries: int = self.queries.stop - self.queries.start
        num_keys: int = self.keys.stop - self.keys.start
        return num_queries * (num_queries + 1) // 2 if self.causal else num_queries * num_keys


class SequencePlacement:
    """A sequence of `sequence` positions on the `size` ranks of an axis; `length` of them on each."""

    def __init__(self, name: str, sequence: int, size: int):
        if name not in PLACEMENTS:
            raise ConfigError(f"placement {name!r}; needed one of {', '.join(PLACEMENTS)}")
        self.name = name
        self.sequence = sequence
        self.size = size
        num_chunks = 2 * size if name == "zigzag" else size
        if sequence % num_chunks or sequence < num_chunks:
            nearest = max(1, round(sequence / num_chunks)) * num_chunks
            raise ConfigError(
                f"data.sequence = {sequence} doesn't divide into {num_chunks} equal chunks, which cp = "
                f"{size} with {name} placement needs; use a multiple of {num_chunks}, such as {nearest}, or "
                "another parallel.cp"
            )
        self.length = sequence // size
        self._chunk = sequence // num_chunks

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """Return the [begin, end) of what `rank` holds, in the order in which it holds it: by position."""
        chunks = [rank] if self.name == "plain" else [rank, 2 * self.size - 1 - rank]
        return [(chunk * self._chunk, (chunk + 1) * self._chunk) for chunk in chunks]

    def positions(self, rank: int) -> np.ndarray:
        """Return the position of everything `rank` holds, [t].

        RoPE needs it, and whoever cuts tokens, labels, masks and documents.
        """
        return np.concatenate([np.arange(begin, end) for begin, end in self.spans(rank)])

    def pieces(self) -> list[tuple[int, slice, slice]]:
        """Return (rank, slice of what it holds, slice of the sequence) of every chunk.

        This says how shards and the whole fit together.
        """
        pieces = []
        for rank in range(self.size):
            for i, (begin, end) in enumerate(self.spans(rank)):
                pieces.append((rank, slice(i * self._chunk, (i + 1) * self._chunk), slice(begin, end)))
        return pieces

    def tiles(self, rank: int, source: int) -> list[Tile]:
        """Return what the queries of `rank` see of the keys of `source`.

        The first tile of the own keys has every query.

        zigzag: an earlier source's early chunk is before all queries; a later source lies between
        our chunks, before the late one.
        """
        all_here = slice(0, self.length)
        half = self.length // 2
        if source == rank:
            return [Tile(all_here, all_here, causal=True)]
        if source < rank:
            return [Tile(all_here, all_here if self.name == "plain" else slice(0, half))]
        if self.name == "plain":
            return []  # causality masks all keys of a later rank
        return [Tile(slice(half, self.length), all_here)]

    def own_in_two(self) -> tuple[list[Tile], list[Tile]]:
        """Return the tiles of the own keys in two parts of about the same work, to fill two waits.

        The late half of the queries sees all early keys | each half sees itself causally.
        """
        early = slice(0, self.length // 2)
        late = slice(self.length // 2, self.length)
        if self.length < 2:
            return [], self.tiles(0, 0)
        return [Tile(late, early)], [Tile(early, early, causal=True), Tile(late, late, causal=True)]

    def tiles_of_others(self, rank: int) -> list[Tile]:
        """Return what the queries of `rank` see of other ranks' keys.

        The keys are slices of the whole sequence.
        """
        tiles = []
        end_before = 0
        for i, (begin, end) in enumerate(self.spans(rank)):
            if begin > end_before:
                tiles.append(Tile(slice(i * self._chunk, self.length), slice(end_before, begin)))
            end_before = end
        return tiles


def placement_of(
    kind: str,
    sequence: int,
    size: int,
    heads: int,
    kv_heads: int,
) -> SequencePlacement:
    """Return where the positions of a sequence are for a kind of attention.

    It sends nothing.
    Raises ConfigError for what can't work.
    """
    if kind not in OF_KIND:
        raise ConfigError(f"parallel.context = {kind!r}; needed one of {', '.join(OF_KIND)}")
    if heads % kv_heads:
        raise ConfigError(
            f"model.heads = {heads} is no multiple of model.kv_heads = {kv_heads}; each key-value head "
            "serves as many"
        )
    if kind == "ulysses":
        _require_heads(size, heads, kv_heads)
    return SequencePlacement(OF_KIND[kind], sequence, size)


def _require_heads(size: int, heads: int, kv_heads: int) -> None:
    """Check that every rank gets the same number of query heads, and whole groups or a part of one.

    Raises ConfigError otherwise.
    """
    fitting = [c for c in range(1, heads + 1) if heads % c == 0 and (kv_heads % c == 0 or c % kv_heads == 0)]
    if size not in fitting:
        raise ConfigError(
            f'parallel.context = "ulysses" with cp = {size} spreads {heads} heads and {kv_heads} key-value '
            "heads (those of one tp rank) "
            f"over {size} ranks: cp must divide the heads, and divide or be a multiple of the key-value "
            f"heads; use cp = {', '.join(map(str, fitting))}, or zigzag, ring or gather"
        )

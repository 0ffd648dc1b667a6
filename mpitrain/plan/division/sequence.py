"""Which positions of a sequence each rank of the cp axis holds, and which of its queries see which keys.

A causal query sees the keys at its own position and before. With contiguous pieces (`plain`) the
last rank has nearly twice the mean work; with two chunks per rank, one early and one late
(`zigzag`), all have the same. T positions on c ranks, t = T/c on each:

    plain    4 ranks   0 0 1 1 2 2 3 3      rank r holds [r t, (r+1) t)
    zigzag   4 ranks   0 1 2 3 3 2 1 0      rank r holds chunks r and 2c-1-r of 2c

Where attention stays within documents, that evens out nothing between them. Zigzag rows are then in an
order in which each chunk has a share of each long document: a and b of 8 and 4 positions, 2 ranks

    a0 a1 b0 | a2 a3 b1 | a4 a5 b2 | a6 a7 b3      rank 0 holds the first and the last chunk

A document's positions stay in ascending order: causality in such a row is that of the document.

Source of zigzag: Llama 3 (arXiv:2407.21783, section 3.3.2); the imbalance: striped attention
(arXiv:2311.09431). Integers only here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpitrain.config import Config
from mpitrain.errors import ConfigError, counted

LEAST_SHARE = 512  # positions of a document in a chunk: with fewer, small products cost more than it gains
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

    def part(self, queries: slice, keys: slice) -> "Tile":
        """Return some of its queries against some of its keys, counted from its first ones."""
        return replace(self, queries=_moved(queries, self.queries), keys=_moved(keys, self.keys))

    @property
    def num_pairs(self) -> int:
        """How many (query, key) pairs see each other: what the tile costs."""
        num_queries: int = self.queries.stop - self.queries.start
        num_keys: int = self.keys.stop - self.keys.start
        return num_queries * (num_queries + 1) // 2 if self.causal else num_queries * num_keys


def _moved(part: slice, whole: slice) -> slice:
    return slice(whole.start + part.start, whole.start + part.stop)


class SequencePlacement:
    """A sequence of `sequence` positions on the `size` ranks of an axis; `length` of them on each.

    name: plain, or zigzag.
    """

    def __init__(self, name: str, sequence: int, size: int):
        self.name = name
        self.sequence = sequence
        self.size = size
        num_chunks = self.num_chunks = 2 * size if name == "zigzag" else size
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

    @property
    def divides_documents(self) -> bool:
        """Whether a document can be so long that chunks have shares of it."""
        return self.name == "zigzag" and self.sequence >= LEAST_SHARE * self.num_chunks

    def order(self, documents_T: np.ndarray) -> np.ndarray:
        """Return the positions of a row in the order in which chunks have shares of its documents, [T].

        documents_T: the document of each position. Those that are too short aren't divided: they
        fill the chunks up, side by side.
        """
        begins = np.flatnonzero(np.diff(documents_T, prepend=-1))
        lengths = np.diff(begins, append=self.sequence)
        chunk_T = np.full(self.sequence, -1)
        rooms = np.full(self.num_chunks, self._chunk)
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
            if length < LEAST_SHARE * self.num_chunks:
                continue
            share, rest = divmod(length, self.num_chunks)
            shares = np.full(self.num_chunks, share)
            shares[np.argsort(-rooms, kind="stable")[:rest]] += 1
            chunk_T[begin : begin + length] = np.repeat(np.arange(self.num_chunks), shares)
            rooms -= shares
        chunk_T[chunk_T < 0] = np.repeat(np.arange(self.num_chunks), rooms)
        return np.argsort(chunk_T, kind="stable")

    def pieces(self) -> list[tuple[int, slice, slice]]:
        """Return (rank, slice of what it holds, slice of the sequence) of every chunk."""
        return [
            (rank, slice(i * self._chunk, (i + 1) * self._chunk), slice(begin, end))
            for rank in range(self.size)
            for i, (begin, end) in enumerate(self.spans(rank))
        ]

    def tiles(self, rank: int, source: int, in_chunks: bool = False) -> list[Tile]:
        """Return what the queries of `rank` see of the keys of `source`.

        The first tiles of the own keys have every query.
        in_chunks: each tile is of one chunk of queries and one of keys.

        zigzag: an earlier source's early chunk is before all queries; a later source lies between
        our chunks, before the late one. plain: causality masks all keys of a later rank.
        """
        all_here, half = slice(0, self.length), self.length // 2
        plain = self.name == "plain"
        if source == rank:
            tiles = [Tile(all_here, all_here, causal=True)]
        elif source < rank:
            tiles = [Tile(all_here, all_here if plain else slice(0, half))]
        else:
            tiles = [] if plain else [Tile(slice(half, self.length), all_here)]
        return self._in_chunks(tiles) if in_chunks else tiles

    def own_in_two(self) -> tuple[list[Tile], list[Tile]]:
        """Return the tiles of the own keys in two parts of about the same work, to fill two waits.

        The late half of the queries sees all early keys | each half sees itself causally.
        """
        early = slice(0, self.length // 2)
        late = slice(self.length // 2, self.length)
        if self.length < 2:
            return [], self.tiles(0, 0)
        return [Tile(late, early)], [Tile(early, early, causal=True), Tile(late, late, causal=True)]

    def tiles_of_others(self, rank: int, in_chunks: bool = False) -> list[Tile]:
        """Return what the queries of `rank` see of other ranks' keys, as slices of the whole sequence."""
        tiles = list[Tile]()
        end_before = 0
        for i, (begin, end) in enumerate(self.spans(rank)):
            if begin > end_before:
                tiles.append(Tile(slice(i * self._chunk, self.length), slice(end_before, begin)))
            end_before = end
        return self._in_chunks(tiles) if in_chunks else tiles

    def _in_chunks(self, tiles: Sequence[Tile]) -> list[Tile]:
        """Return the same tiles, each of one chunk of queries and one of keys, those of own keys first."""
        found = list[Tile]()
        for tile in tiles:
            for queries in self._chunks_of(tile.queries):
                found += [
                    Tile(queries, keys, tile.causal and keys == queries)
                    for keys in self._chunks_of(tile.keys)
                    if not tile.causal or keys.start <= queries.start
                ]
        return sorted(found, key=lambda tile: not tile.causal)

    def _chunks_of(self, positions: slice) -> list[slice]:
        begins = range(positions.start, positions.stop, self._chunk)
        return [slice(begin, begin + self._chunk) for begin in begins]


def placement_of(kind: str, sequence: int, size: int, heads: int, kv_heads: int) -> SequencePlacement:
    """Return where the positions of a sequence are for a kind of attention.

    It sends nothing. heads, kv_heads: of a rank of tp, the second divides the first. Raises
    ConfigError for what can't work: with ulysses every rank needs the same number of query heads,
    and whole groups or a part of one.
    """
    fitting = [c for c in range(1, heads + 1) if heads % c == 0 and (kv_heads % c == 0 or c % kv_heads == 0)]
    if kind == "ulysses" and size not in fitting:
        raise ConfigError(
            f'parallel.context = "ulysses" with cp = {size} spreads {counted(heads, "heads")} and '
            f"{counted(kv_heads, 'key-value heads')} (those of one tp rank) over {size} ranks: "
            "cp must divide the heads, and divide or be a multiple of the key-value heads; "
            f"use cp = {', '.join(map(str, fitting))}, or zigzag, ring or gather"
        )
    return SequencePlacement(OF_KIND[kind], sequence, size)


def placement_of_rows(config: Config, length: int = 0) -> SequencePlacement | None:
    """Return where the positions of a run's rows are; None: they aren't spread over ranks.

    length: of a row; 0: data.sequence. Raises ConfigError as placement_of() does.
    """
    parallel, model = config.parallel, config.model
    if parallel.cp == 1:
        return None
    heads = (model.heads or 1) // parallel.tp
    kv_heads = max(1, (model.kv_heads or model.heads or 1) // parallel.tp)
    return placement_of(parallel.context, length or config.data.sequence, parallel.cp, heads, kv_heads)

"""Packed rows: whole documents side by side, best fit first (data.documents = "packed").

    documents  aaaa bb ccccc d     row of 7  c c c c c b b     each row has pieces of documents, and
                                             a a a a d . .     positions without loss after them

Documents are dealt to blocks of BLOCK by a permutation of the seed, the same in all epochs. A block
is planned by itself: best-fit decreasing (Johnson, Near-optimal bin packing algorithms, 1973). An
epoch reads the blocks in an order of its own, and the rows of a block likewise: a slot's row is
found from the seed and the block that it is in.

A document that is longer than a row becomes pieces of a row each, and a shorter last one. The last
token of a piece is the first one of the next: it is a target in one, an input in the other. A
document of one token predicts nothing, and is left out.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.data.order import Sampler
from mpitrain.data.permutation import FEISTEL, ORDERS, FeistelOrder, Order, TextOrder
from mpitrain.data.token_rows import Text, TokenRows
from mpitrain.errors import DataError

BLOCK = 1 << 16  # documents
KEPT_PLANS = 2  # a step may read the end of a block and the beginning of another
SEED_STEP = 0x9E3779B97F4A7C15  # of splitmix64: seeds of blocks
SEEDS = 1 << 64


def pieces_of(begins: np.ndarray, lasts: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Return begin and end of the pieces of documents, of at most `sequence` + 1 tokens each."""
    targets = lasts - begins - 1
    counts = -(-np.maximum(targets, 0) // sequence)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    number = np.arange(int(counts.sum())) - first
    starts = np.repeat(begins, counts) + number * sequence
    return starts, np.minimum(starts + sequence + 1, np.repeat(lasts, counts))


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each length, [n], by best-fit decreasing; rows count from 0.

    Equal lengths are placed together: of the rows with the least room that suffices, each takes as
    many as fit, which is what taking one after the other comes to.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    rooms = list[int]()  # ascending, of rows that aren't full
    rows_with = dict[int, list[int]]()
    placed = list[int]()
    num_rows = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else capacity
            fitting = room // length
            if at < len(rooms):
                rows = rows_with[room]
            else:
                rows = list(range(num_rows, num_rows - (-count // fitting)))
                num_rows += len(rows)
            taken = rows[: -(-count // fitting)]
            del rows[: len(taken)]
            if at < len(rooms) and not rows:
                rooms.pop(at)
            many = min(count, fitting * len(taken))
            placed += [row for row in taken for _ in range(fitting)][:many]
            full, rest = divmod(many, fitting)
            _put_back(taken[:full], room - fitting * length, rooms, rows_with)
            _put_back(taken[full:], room - rest * length, rooms, rows_with)
            count -= many
    found = np.empty(len(lengths), np.int64)
    found[longest_first] = placed
    return found


def _put_back(rows: list[int], room: int, rooms: list[int], rows_with: dict[int, list[int]]) -> None:
    """Note the room that rows have left."""
    if not rows or not room:
        return
    others = rows_with.setdefault(room, [])
    if not others:
        insort(rooms, room)
    others += rows


class BlockPlan(NamedTuple):
    """The rows of a block: pieces [begin, end) of the tokens; row i has cuts[i] to cuts[i + 1]."""

    begins: np.ndarray
    lasts: np.ndarray
    cuts: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.cuts) - 1

    @property
    def num_pairs(self) -> int:
        """Return how many (query, key) pairs see each other, of all rows."""
        inputs = self.lasts - self.begins - 1
        return int((inputs * (inputs + 1) // 2).sum())


class PackedSampler:
    """The packed rows of a text, in an order of their own for every epoch.

    seed, order: as Sampler has them.
    whole: documents that are longer than a row are left out, not cut.
    too_long: how many tokens the longest of these has; num_left_out: how many there are.
    attended_length: length of a sequence without documents whose attention computes as much.
    """

    def __init__(
        self,
        text: Text,
        sequence: int,
        seed: int | None = None,
        order: str = FEISTEL,
        whole: bool = False,
    ):
        self.too_long = self.num_left_out = 0
        self._whole = whole
        self.is_shuffled = seed is not None
        self._text = text
        self._sequence = sequence
        self._seed = seed
        self._order = order
        count = text.num_documents
        self._documents = TextOrder() if seed is None or not count else FeistelOrder(count, seed)
        self._plans = dict[int, BlockPlan]()
        blocks = [self._made(block, count=True) for block in range(-(-count // BLOCK))]
        self._sizes = np.array([plan.num_rows for plan in blocks], np.int64)
        self.num_sequences = int(self._sizes.sum())
        if not self.num_sequences and not self.num_left_out:
            raise DataError(
                'data.documents = "packed": no document of the text has two tokens, so that one '
                "predicts another; use more text"
            )
        num_pairs = sum(plan.num_pairs for plan in blocks)
        self.attended_length = -(-2 * num_pairs // max(1, self.num_sequences * sequence))
        self._blocks = self._order_of(len(blocks), 0)
        self._epoch = (-1, np.empty(0, np.int64), np.empty(0, np.int64))

    def _order_of(self, count: int, number: int) -> Order:
        if self._seed is None:
            return TextOrder()
        return ORDERS[self._order](count, (self._seed + number * SEED_STEP) % SEEDS)

    def rows(self, slots: Sequence[int]) -> TokenRows:
        """Return the rows for `slots`, in the order asked: [len(slots), sequence + 1]."""
        pieces = [self.pieces(int(slot)) for slot in slots]
        return self._text.packed(pieces, self._sequence + 1)

    def pieces(self, slot: int) -> list[tuple[int, int]]:
        """Return the pieces of tokens.bin that a slot's row has: begin and end of each."""
        epoch, place = divmod(slot, self.num_sequences)
        blocks, behind = self._blocks_of(epoch)
        at = int(np.searchsorted(behind, place, side="right"))
        block = int(blocks[at])
        place -= int(behind[at - 1]) if at else 0
        order = self._order_of(int(self._sizes[block]), block + 1)
        row = int(order.windows(epoch, np.array([place], np.int64))[0])
        plan = self._plan(block)
        here = slice(plan.cuts[row], plan.cuts[row + 1])
        return list(zip(plan.begins[here].tolist(), plan.lasts[here].tolist(), strict=True))

    def sequences(self, slots: Sequence[int]) -> np.ndarray:
        """Return the tokens of these rows."""
        return self.rows(slots).tokens

    def _blocks_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks in the order of an epoch, and its rows up to the end of each."""
        if self._epoch[0] != epoch:
            blocks = self._blocks.windows(epoch, np.arange(len(self._sizes)))
            self._epoch = (epoch, blocks, np.cumsum(self._sizes[blocks]))
        return self._epoch[1:]

    def _plan(self, block: int) -> BlockPlan:
        if block not in self._plans:
            while len(self._plans) >= KEPT_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[block] = self._made(block)
        return self._plans[block]

    def _made(self, block: int, count: bool = False) -> BlockPlan:
        """Plan a block: a pure function of the text and the seed. count: what is left out of it."""
        last = min((block + 1) * BLOCK, self._text.num_documents)
        numbers = self._documents.windows(0, np.arange(block * BLOCK, last))
        begins, lasts = self._text.documents(numbers)
        if self._whole:
            fitting = lasts - begins <= self._sequence + 1
            if count and not fitting.all():
                self.num_left_out += int((~fitting).sum())
                self.too_long = max(self.too_long, int((lasts - begins).max()))
            begins, lasts = begins[fitting], lasts[fitting]
        begins, lasts = pieces_of(begins, lasts, self._sequence)
        rows = best_fit(lasts - begins, self._sequence + 1)
        by_row = np.argsort(rows, kind="stable")
        counts = np.bincount(rows)
        return BlockPlan(begins[by_row], lasts[by_row], np.concatenate([[0], np.cumsum(counts)]))


SourceSampler = Sampler | PackedSampler

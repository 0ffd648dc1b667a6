"""Packed rows: whole documents side by side, best fit first (data.documents = "packed").

    documents  aaaa bb ccccc d     row of 7  b b c c c c c     each row has pieces of documents, and
                                             d a a a a . .     positions without loss after them

Documents are dealt to blocks of BLOCK by a permutation of the seed, the same in all epochs. A block
is planned by itself: best-fit decreasing (Johnson, Near-optimal bin packing algorithms, 1973). An
epoch reads the blocks in an order of its own, and the rows of a block likewise.

A document that is longer than a row becomes pieces of a row each, and a shorter last one. The last
token of a piece is a target there, and an input in the next. A document of one token predicts
nothing, and is left out. Pieces of a whole row come first among the rows of a block, and aren't
listed: a plan is as large as its documents are many, however long.

How many rows each block has must be known before the first step. PackCounts is kept beside the
tokens (training/corpora.py): the first start plans all blocks, later ones those that they read.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.data.order import Sampler
from mpitrain.data.permutation import FEISTEL, ORDERS, FeistelOrder, Order, TextOrder
from mpitrain.data.token_rows import Text, TokenRows
from mpitrain.errors import DataError

BLOCK = 1 << 16  # documents
KEPT_PLANS = 4  # a step may read the end of a block and the beginning of others
SEED_STEP = 0x9E3779B97F4A7C15  # of splitmix64: seeds of blocks
SEEDS = 1 << 64


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each length, [n], by best-fit decreasing; rows count from 0.

    Equal lengths are placed together: each row with the least room that suffices takes as many as fit.
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
    """The rows of a block: first those of one piece that fills them, then those of best fit.

    sequence: targets of a full row.
    documents: where each begins; full_ends: full rows up to the end of each.
    begins, lasts, cuts: of the other pieces; row i after the full ones has cuts[i] to cuts[i + 1].
    """

    sequence: int
    documents: np.ndarray
    full_ends: np.ndarray
    begins: np.ndarray
    lasts: np.ndarray
    cuts: np.ndarray

    @classmethod
    def of(cls, begins: np.ndarray, lasts: np.ndarray, sequence: int) -> "BlockPlan":
        """Plan documents, of which begin and end are given."""
        full, rest = np.divmod(np.maximum(lasts - begins - 1, 0), sequence)
        tails = np.flatnonzero(rest)
        starts = begins[tails] + full[tails] * sequence
        lengths = rest[tails] + 1
        rows = best_fit(lengths, sequence + 1)
        by_row = np.argsort(rows, kind="stable")
        cuts = np.concatenate([[0], np.cumsum(np.bincount(rows))])
        return cls(sequence, begins, np.cumsum(full), starts[by_row], (starts + lengths)[by_row], cuts)

    @property
    def num_full(self) -> int:
        return int(self.full_ends[-1]) if len(self.full_ends) else 0

    @property
    def num_rows(self) -> int:
        return self.num_full + len(self.cuts) - 1

    @property
    def num_pairs(self) -> int:
        """Return how many (query, key) pairs see each other, of all rows."""
        inputs = self.lasts - self.begins - 1
        full = self.num_full * self.sequence * (self.sequence + 1) // 2
        return full + int((inputs * (inputs + 1) // 2).sum())

    def pairs_of(self, rows: np.ndarray) -> np.ndarray:
        """Return how many (query, key) pairs see each other in each row."""
        inputs = self.lasts - self.begins - 1
        of_rest = np.add.reduceat(inputs * (inputs + 1) // 2, self.cuts[:-1]) if len(inputs) else inputs
        full = self.sequence * (self.sequence + 1) // 2
        return np.concatenate([[full], of_rest])[np.maximum(rows - self.num_full + 1, 0)]

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return begin and end of the pieces of tokens.bin that a row has."""
        if row < self.num_full:
            document = int(np.searchsorted(self.full_ends, row, side="right"))
            number = row - (int(self.full_ends[document - 1]) if document else 0)
            begin = int(self.documents[document]) + number * self.sequence
            return [(begin, begin + self.sequence + 1)]
        row -= self.num_full
        here = slice(self.cuts[row], self.cuts[row + 1])
        return long_outside(list(zip(self.begins[here].tolist(), self.lasts[here].tolist(), strict=True)))


def long_outside(pieces: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pieces of a row with the longest first and last, the shortest in the middle.

    With context parallelism a rank has a chunk of a row and its mirror image: all have about equal work.
    """
    by_length = sorted(pieces, key=lambda piece: piece[1] - piece[0])
    return by_length[::2][::-1] + by_length[1::2]


class PackCounts(NamedTuple):
    """What a sampler has to know of all blocks.

    sizes: rows of each, int64.  num_pairs: (query, key) pairs of all rows that see each other.
    num_left_out: documents longer than a row, which must be whole; too_long: tokens of the longest.
    """

    sizes: np.ndarray
    num_pairs: int
    num_left_out: int = 0
    too_long: int = 0


class PackedSampler:
    """The packed rows of a text, in an order of their own for every epoch.

    seed, order: as Sampler has them.
    whole: documents that are longer than a row are left out, not cut.
    counts: of all blocks, as a sampler of the same text and seed has them; None: they are planned,
    and `each` is called before each.
    attended_length: length of a sequence without documents whose attention computes as much.
    """

    def __init__(
        self,
        text: Text,
        sequence: int,
        seed: int | None = None,
        order: str = FEISTEL,
        whole: bool = False,
        counts: PackCounts | None = None,
        each: Callable[[str], object] = lambda what: None,
    ):
        self._whole = whole
        self.is_shuffled = seed is not None
        self._text = text
        self._sequence = sequence
        self._seed = seed
        self._order = order
        count = text.num_documents
        self._documents = TextOrder() if seed is None or not count else FeistelOrder(count, seed)
        self._plans = dict[int, BlockPlan]()
        self.counts = counts or self._counted(-(-count // BLOCK), each)
        self._sizes = self.counts.sizes
        self.num_sequences = int(self._sizes.sum())
        if not self.num_sequences and not self.counts.num_left_out:
            raise DataError(
                'data.documents = "packed": no document of the text has two tokens, so that one '
                "predicts another; use more text"
            )
        self.attended_length = -(-2 * self.counts.num_pairs // max(1, self.num_sequences * sequence))
        self._blocks = self._order_of(len(self._sizes), 0)
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
        ((block, _, rows),) = self._located(np.array([slot]))
        return self._plan(block).pieces(int(rows[0]))

    def costs(self, slots: Sequence[int]) -> np.ndarray | None:
        """Return how many (query, key) pairs see each other in each row; None: it takes too many plans."""
        located = list(self._located(np.asarray(slots, np.int64)))
        if len(located) > KEPT_PLANS:
            return None
        found = np.empty(len(slots), np.int64)
        for block, here, rows in located:
            found[here] = self._plan(block).pairs_of(rows)
        return found

    def _located(self, slots: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield each block that slots have a row of, which slots these are, and the rows."""
        epochs, places = np.divmod(slots, self.num_sequences)
        for epoch in np.unique(epochs).tolist():
            blocks, totals = self._blocks_of(epoch)
            of_epoch = np.flatnonzero(epochs == epoch)
            at = np.searchsorted(totals, places[of_epoch], side="right")
            for number in np.unique(at).tolist():
                here = of_epoch[at == number]
                block = int(blocks[number])
                within = places[here] - (int(totals[number - 1]) if number else 0)
                order = self._order_of(int(self._sizes[block]), block + 1)
                yield block, here, order.windows(epoch, within)

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
            begins, lasts = self._documents_of(block)
            if self._whole:
                fitting = lasts - begins <= self._sequence + 1
                begins, lasts = begins[fitting], lasts[fitting]
            self._plans[block] = BlockPlan.of(begins, lasts, self._sequence)
        return self._plans[block]

    def _documents_of(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return begin and end of the documents of a block: a pure function of the text and the seed."""
        last = min((block + 1) * BLOCK, self._text.num_documents)
        return self._text.documents(self._documents.windows(0, np.arange(block * BLOCK, last)))

    def _counted(self, num_blocks: int, each: Callable[[str], object]) -> PackCounts:
        """Plan all blocks."""
        sizes = np.zeros(num_blocks, np.int64)
        num_pairs = num_left_out = too_long = 0
        for block in range(num_blocks):
            each(f"packing documents, block {block + 1} of {num_blocks}")
            plan = self._plan(block)
            sizes[block] = plan.num_rows
            num_pairs += plan.num_pairs
            if self._whole:
                begins, lasts = self._documents_of(block)
                longer = lasts - begins > self._sequence + 1
                num_left_out += int(longer.sum())
                too_long = max(too_long, int((lasts - begins)[longer].max(initial=0)))
        return PackCounts(sizes, num_pairs, num_left_out, too_long)


SourceSampler = Sampler | PackedSampler

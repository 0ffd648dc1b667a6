"""The sequences of each step, where batches or sequences grow (batch.growth, batch.lengths)."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import TypeVar

from mpitrain.config import Batch
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown

V = TypeVar("V")
Changes = Sequence[tuple[int, V]]
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
AMOUNT = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,12})?(?:E\+?[0-9]{1,2})?)([KMBT]?)")


class BatchSizes:
    """How many sequences a step reads, and in rows of which length: pure functions of its number."""

    def __init__(self, batch: Batch):
        """batch: resolved, with steps in place of tokens."""
        self.changes: Changes[int] = batch.growth or ((1, batch.global_),)
        self._lengths: Changes[int] = batch.lengths or ((1, 0),)

    def at(self, step: int) -> int:
        """Return the sequences of a step, counted from 1."""
        return value_at(self.changes, step)

    def length_at(self, step: int) -> int:
        """Return the length of the rows that a step's sequences are cut into; 0: they aren't cut."""
        return value_at(self._lengths, step)

    def before(self, step: int) -> int:
        """Return the sequences of all steps before this one."""
        firsts = [first for first, _ in self.changes]
        lasts = [min(first, step) for first in [*firsts[1:], step]]
        pairs = zip(self.changes, lasts, strict=True)
        return sum(max(last - first, 0) * size for (first, size), last in pairs)

    def step_of(self, when: int | str, sequence: int, key: str) -> int:
        """Return the first step before which that many tokens were read; `when` itself, if it is a step.

        when: a step, or text such as "4B".  sequence: tokens.  key: for messages.
        """
        if isinstance(when, int):
            return when
        needed = -(-_tokens_of(when, key) // sequence)
        earlier = (change for change in reversed(self.changes) if self.before(change[0]) < needed)
        first, size = next(earlier, self.changes[0])
        return first - (self.before(first) - needed) // size

    @property
    def firsts(self) -> list[int]:
        """Return the steps from which on something has changed."""
        return sorted({first for first, _ in (*self.changes, *self._lengths)})

    def alike(self, step: int, steps: int) -> range:
        """Return the steps with the sizes of this one, of a run of so many steps."""
        first = max(first for first in self.firsts if first <= step)
        return range(first, min([first for first in self.firsts if first > step] + [steps + 1]))

    def first_difference(self, other: "BatchSizes", step: int, sequence: int) -> int | None:
        """Return the first step, up to this one, that has other sizes; None if there is none.

        sequence: data.sequence, of rows that aren't cut.
        """

        def sizes_of(batch: BatchSizes, first: int) -> tuple[int, int]:
            return batch.at(first), batch.length_at(first) or sequence

        firsts = sorted(first for first in {*self.firsts, *other.firsts} if first <= step)
        return next((first for first in firsts if sizes_of(self, first) != sizes_of(other, first)), None)


def value_at(changes: Changes[V], step: int) -> V:
    """Return the value that holds at a step. changes: ascending; the first one holds from the start."""
    return next(value for first, value in reversed(changes) if first <= step)


def amount_in(text: str) -> Fraction:
    """Return the number that a text such as "1.5B" means; 0: none, or too large a one."""
    match = AMOUNT.fullmatch(text.upper())
    amount = Fraction(match[1]) * UNITS[match[2]] if match else Fraction(0)
    return amount if amount < 2**63 else Fraction(0)


def _tokens_of(text: str, key: str) -> int:
    """Return the number of tokens that a text means. Raises ConfigError if it is none."""
    tokens = amount_in(text)
    if not tokens or tokens.denominator != 1:
        raise ConfigError(f'{key}: found {shown(repr(text))}; give a step, or tokens such as "4B" or "300M"')
    return int(tokens)

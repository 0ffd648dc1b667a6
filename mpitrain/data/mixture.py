"""Mix sources by weight: which of them each slot of the order is read from, and which of its sequences.

A pure function of the weights: nothing is kept, and any slot can be asked for. Within a phase, that is
between two changes of weights, each source's count stays within less than one of its exact share, at every
prefix of a million slots: Tijdeman's rule for the chairman assignment problem (Discrete Mathematics 32,
1980), in integers. Weights of which the period is longer begin anew then, with less than one more.

    weights 2 : 1     slots  0 1 2 3 4 5      a source of which all epochs are read ends; the others share
                      source 0 1 0 0 1 0      its slots from there, by their weights: another phase
"""

import heapq
import math
from array import array
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mpitrain.config import Data, DataSource
from mpitrain.data.balance import balanced_order
from mpitrain.data.batch_sizes import BatchSizes, value_at
from mpitrain.data.packed_rows import SourceSampler
from mpitrain.data.token_rows import TokenRows
from mpitrain.errors import ConfigError, DataError

MOST_PERIOD = 1 << 20  # slots of a cycle
LEAST_SHARE = Fraction(1, MOST_PERIOD)  # so that every source has slots in a cycle
BLOCK = 1024  # slots for which counts are kept


def in_integers(weights: Sequence[float]) -> list[int]:
    """Return weights in the smallest integers with the same ratios; none has less than LEAST_SHARE."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    least = LEAST_SHARE * sum(exact)
    exact = [max(weight, least) if weight else weight for weight in exact]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return [weight // math.gcd(*whole) for weight in whole]


class Shares:
    """Tijdeman's assignment of slots to sources with positive integer weights. It repeats every `period`."""

    def __init__(self, weights: Sequence[int]):
        self.weights = tuple(weights)
        self._sum = sum(weights)
        self.period = min(self._sum, MOST_PERIOD)
        self._sources = array("H")
        self._counts = [[0] * len(weights)]  # before each block
        num = len(weights)
        self._slack = max(2 * num - 2, 1)
        self._made = [0] * num
        # (last slot for it, source) of what may be assigned now; (first slot, last slot, source) of the rest
        self._ready = list[tuple[int, int]]()
        self._later = [(*self._window(source), source) for source in range(num)]
        heapq.heapify(self._later)

    def _window(self, source: int) -> tuple[int, int]:
        """Return from when to when the next slot of a source may be, counted from 1."""
        made, weight = self._made[source], self.weights[source]
        first = -(-(1 + self._slack * made) * self._sum // (self._slack * weight))
        last = (self._slack * (made + 1) - 1) * self._sum // (self._slack * weight)
        return first, last

    def _extend(self, length: int) -> None:
        """Assign the slots of the period up to `length`, in their order: whose time ends first is first."""
        later, ready, made = self._later, self._ready, self._made
        for slot in range(len(self._sources) + 1, length + 1):
            while later and later[0][0] <= slot:
                _, last, source = heapq.heappop(later)
                heapq.heappush(ready, (last, source))
            source = ready[0][1]
            made[source] += 1
            self._sources.append(source)
            first, last = self._window(source)
            if first <= slot + 1:
                heapq.heapreplace(ready, (last, source))
            else:
                heapq.heappop(ready)
                heapq.heappush(later, (first, last, source))
            if slot % BLOCK == 0:
                self._counts.append(list(made))

    def sources(self, slots: np.ndarray) -> np.ndarray:
        """Return the source of each slot: int64, of their shape."""
        places = slots % self.period
        self._extend(int(places.max(initial=-1)) + 1)
        return np.frombuffer(self._sources, np.uint16)[places].astype(np.int64)

    def counts(self, slot: int) -> np.ndarray:
        """Return how many slots before this one each source has."""
        cycles, place = divmod(slot, self.period)
        self._extend(place)
        within = self._counts_within(place)
        return within + cycles * self._of_a_cycle() if cycles else within

    def _of_a_cycle(self) -> np.ndarray:
        if self.period == self._sum:
            return np.array(self.weights, np.int64)
        self._extend(self.period)
        return self._counts_within(self.period)

    def _counts_within(self, place: int) -> np.ndarray:
        begin = place - place % BLOCK
        within = np.frombuffer(self._sources, np.uint16)[begin:place]
        known = np.array(self._counts[place // BLOCK], np.int64)
        return known + np.bincount(within, minlength=len(known))

    def slot_of(self, source: int, number: int) -> int:
        """Return the slot that a source has for the time `number`, counted from 0."""
        cycles, rest = divmod(number, int(self._of_a_cycle()[source]))
        self._extend(self.period)
        places = np.flatnonzero(np.frombuffer(self._sources, np.uint16) == source)
        return cycles * self.period + int(places[rest])


class Blend(NamedTuple):
    """Weights that hold from a slot on."""

    begin: int
    weights: tuple[float, ...]


class BlendPhase(NamedTuple):
    """Slots with the same weights. sources: those that have a share, in the order of `shares`.

    before: sequences that were read of each source of the mixture.
    """

    begin: int
    shares: Shares
    sources: np.ndarray
    before: np.ndarray


class Places(NamedTuple):
    """Where slots are read from: the source, and the number of the sequence in that source's own order."""

    sources: np.ndarray
    numbers: np.ndarray


class Mixture:
    """Which source each slot is read from.

    most: sequences of each source, over all its epochs; 0: no limit.
    length: slots until every source has ended; None: one has no limit.
    """

    def __init__(self, blends: Sequence[Blend], most: Sequence[int]):
        self.phases = list[BlendPhase]()
        self.length: int | None = None
        self._most = np.array(most, np.int64)
        read = np.zeros(len(most), np.int64)
        begin = 0
        for blend, after in zip(blends, [*(blend.begin for blend in blends[1:]), None], strict=True):
            while self.length is None and (after is None or begin < after):
                ended = (self._most > 0) & (read >= self._most)
                active = np.flatnonzero((np.array(blend.weights) > 0) & ~ended)
                if not active.size:
                    self.length = begin
                    break
                shares = Shares(in_integers([blend.weights[number] for number in active.tolist()]))
                self.phases.append(BlendPhase(begin, shares, active, read.copy()))
                end = self._first_end(self.phases[-1])
                if after is not None and (end is None or end >= after):
                    end = after
                if end is None:
                    break
                read[active] += shares.counts(end - begin)
                begin = end

    def _first_end(self, phase: BlendPhase) -> int | None:
        """Return the slot after the last one of the source that ends first; None if none does."""
        ends = [
            phase.begin + phase.shares.slot_of(place, int(self._most[source] - phase.before[source]) - 1) + 1
            for place, source in enumerate(phase.sources.tolist())
            if self._most[source]
        ]
        return min(ends, default=None)

    def places(self, slots: np.ndarray) -> Places:
        """Return where some slots are read from. Raises DataError for one after the end of all sources."""
        self.require(int(slots.max(initial=-1)) + 1)
        sources = np.empty(len(slots), np.int64)
        numbers = np.empty(len(slots), np.int64)
        begins = [phase.begin for phase in self.phases]
        of_phase = np.searchsorted(begins, slots, side="right") - 1
        for number in np.unique(of_phase).tolist():
            here = np.flatnonzero(of_phase == number)
            phase = self.phases[number]
            sources[here], numbers[here] = _in_phase(phase, slots[here] - phase.begin)
        return Places(sources, numbers)

    def require(self, count: int) -> None:
        """Raise DataError if all sources end before `count` sequences are read."""
        if self.length is not None and count > self.length:
            raise DataError(
                f"data.sources: all sources end after {self.length:,} sequences, {count:,} needed; allow "
                "more epochs, or take fewer steps (run.steps)"
            )

    def until(self, slot: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Return what decides the slots before this one, to be compared."""
        phases = [phase for phase in self.phases if phase.begin < slot]
        return [(phase.begin, phase.shares.weights, tuple(phase.sources.tolist())) for phase in phases]


def _in_phase(phase: BlendPhase, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sources of slots, and the numbers of their sequences. slots: counted in the phase."""
    found = phase.shares.sources(slots)
    numbers = np.empty(len(slots), np.int64)
    blocks = slots // BLOCK
    order = np.argsort(blocks, kind="stable")
    cuts = np.flatnonzero(np.diff(blocks[order])) + 1
    for here in np.split(order, cuts) if len(slots) else ():
        begin = int(slots[here].min())
        row = phase.shares.sources(np.arange(begin, int(slots[here].max()) + 1))
        before = phase.shares.counts(begin)
        for source in np.unique(found[here]).tolist():
            own = here[found[here] == source]
            numbers[own] = before[source] + np.cumsum(row == source)[slots[own] - begin] - 1
    sources = phase.sources[found]
    return sources, numbers + phase.before[sources]


def weights_by_step(data: Data, batch: BatchSizes) -> list[tuple[int, tuple[float, ...]]]:
    """Return the weights of all sources, from each step on where one changes."""
    tables = [_table_of(source, batch, data.sequence) for source in data.sources]
    steps = sorted({1, *(step for table in tables for step, _ in table)})
    return [(step, tuple(value_at(table, step) for table in tables)) for step in steps]


def first_weights(data: Data, batch: BatchSizes) -> list[float]:
    """Return the first weight above 0 of each source, by which a run is validated; 0 for one without any."""
    of_sources = zip(*(weights for _, weights in weights_by_step(data, batch)), strict=True)
    return [next(filter(None, weights), 0.0) for weights in of_sources]


def _table_of(source: DataSource, batch: BatchSizes, sequence: int) -> list[tuple[int, float]]:
    """Return a source's weights by steps; 0 before the first one that is given. Raises ConfigError."""
    if isinstance(source.weight, float):
        return [(1, source.weight)]
    key = "data.sources, weight"
    changes = sorted((batch.step_of(when, sequence, key), weight) for when, weight in source.weight)
    if not changes:
        raise ConfigError(f"{key} = []: no weight; give a number, or [[step, weight], ...]")
    if twice := [step for (step, _), (after, _) in pairwise(changes) if step == after]:
        raise ConfigError(f"{key}: two weights hold from step {twice[0]} on; give one")
    return [(1, 0.0), *changes]


def mixture_of(data: Data, batch: BatchSizes, sizes: Sequence[int]) -> Mixture:
    """Return the mixture of a configuration. sizes: sequences of each source, of one epoch."""
    most = [source.epochs * size for source, size in zip(data.sources, sizes, strict=True)]
    blends = [Blend(batch.before(step), weights) for step, weights in weights_by_step(data, batch)]
    return Mixture(blends, most)


class MixtureSampler:
    """The sequences of several sources, each in an order of its own, by the weights of a mixture.

    rows(), costs() and pieces() are those of PackedSampler.
    """

    is_shuffled = True

    def __init__(self, samplers: Sequence[SourceSampler], mixture: Mixture):
        self.mixture = mixture
        self.sizes = [sampler.num_sequences for sampler in samplers]
        lengths = [sampler.attended_length for sampler in samplers]
        self.attended_length = round(np.average(lengths, weights=self.sizes))
        self.num_sequences = sum(self.sizes)
        self._samplers = samplers

    def costs(self, slots: Sequence[int]) -> np.ndarray | None:
        sources, numbers = self._places(slots)
        found = np.empty(len(slots), np.int64)
        for source in np.unique(sources).tolist():
            costs = self._samplers[source].costs(numbers[sources == source])
            if costs is None:
                return None
            found[sources == source] = costs
        return found

    def rows(self, slots: Sequence[int]) -> TokenRows:
        sources, numbers = self._places(slots)
        chosen = np.unique(sources).tolist()
        parts = [self._samplers[source].rows(numbers[sources == source]) for source in chosen]
        order = np.argsort(np.concatenate([np.flatnonzero(sources == source) for source in chosen]))
        columns = zip(*parts, strict=True)
        return TokenRows(*(None if x[0] is None else np.concatenate(x)[order] for x in columns))

    def pieces(self, slot: int) -> list[tuple[int, int]]:
        (source,), (number,) = self._places([slot])
        return self._samplers[source].pieces(number)

    def _places(self, slots: Sequence[int]) -> Places:
        return self.mixture.places(np.asarray(slots, np.int64))


class HeldOutMixture(MixtureSampler):
    """Held-out sequences of several sources, by weights that don't change.

    None comes twice before all have come. A source that ends leaves its slots to the others.
    """

    is_shuffled = False

    def __init__(self, samplers: Sequence[SourceSampler], weights: Sequence[float]):
        sizes = [sampler.num_sequences for sampler in samplers]
        super().__init__(samplers, Mixture([Blend(0, tuple(weights))], sizes))

    def _places(self, slots: Sequence[int]) -> Places:
        """As in a mixture; what fills a batch after the last one begins anew."""
        return super()._places(np.asarray(slots, np.int64) % self.num_sequences)


def places_after_skips(slots: Sequence[int], skip: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the places in the order of slots, of which some ranges are left out (data.skip)."""
    places = np.array(slots, np.int64)
    for first, end in skip:
        places[places >= first] += end - first
    return places


class SkippingSampler:
    """The sequences of a sampler without those of some ranges (data.skip); its methods are the sampler's.

    skip: first and end of each range of the sampler's slots, ascending.

        skip [2, 4)    slots 0 1 2 3 ...    sequences of the order 0 1 4 5 ...
    """

    def __init__(self, sampler: SourceSampler | MixtureSampler, skip: Sequence[tuple[int, int]]):
        self.whole = sampler
        self.num_sequences = sampler.num_sequences
        self.is_shuffled = sampler.is_shuffled
        self.attended_length = sampler.attended_length
        self._skip = skip

    def places(self, slots: Sequence[int]) -> np.ndarray:
        """Return the places of slots in the order."""
        return places_after_skips(slots, self._skip)

    def rows(self, slots: Sequence[int]) -> TokenRows:
        return self.whole.rows(self.places(slots))

    def costs(self, slots: Sequence[int]) -> np.ndarray | None:
        return self.whole.costs(self.places(slots))

    def pieces(self, slot: int) -> list[tuple[int, int]]:
        return self.whole.pieces(int(self.places([slot])[0]))


Samplers = SourceSampler | MixtureSampler | SkippingSampler
"""Whatever sequences of a step are asked of, by their places in the order."""


def batch_slots(sampler: Samplers, first: int, count: int) -> list[int]:
    """Return the slots of a batch in the order of its rows: as they come, or balanced by their costs."""
    slots = range(first, first + count)
    costs = sampler.costs(slots)
    return list(slots) if costs is None else [slots[row] for row in balanced_order(costs.tolist())]

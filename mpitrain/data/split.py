"""Training and validation text: stretches of the tokens that share none.

Whole documents are held out, chosen by a hash of their place and the seed: a corpus that is ordered
by its sources is validated with all of them. Of a document that is longer than all that is held out
its end is taken instead, unless it is a conversation, which is never cut.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpitrain.errors import DataError, counted

BLOCK = 1 << 18  # documents that are looked at together
SHIFT = np.uint64(48)
GROUPS = 1 << 16  # of documents, by the first bits of their hashes


class Split(NamedTuple):
    """Stretches [n, 2] of the tokens: begin and end of each, in their order.

    description: how they were chosen.
    """

    train: np.ndarray
    validation: np.ndarray
    description: str


def split(
    ends: np.ndarray, val_fraction: float, sequence: int, seed: int, uncut: Sequence[tuple[int, int]] = ()
) -> Split:
    """Hold out documents of about `val_fraction` of the tokens.

    ends: of documents; the last one is the number of tokens.
    uncut: the first conversation, and the document after the last, of each source of some.

    Where that is less than a sequence, or leaves less to train on, the tail of all tokens is held
    out; of conversations, one. Raises DataError for a single one.
    """
    count = int(ends[-1])
    window = sequence + 1
    _require_enough(count, val_fraction, sequence)
    chosen = _Chosen(ends, val_fraction, seed, uncut)
    whole = chosen.whole()
    if uncut and not 0 < len(whole) < len(ends):
        whole = chosen.first_uncut()
    long = chosen.long
    begins, lasts = _bounds(ends, whole)
    long_begins, long_lasts = _bounds(ends, long)
    tails = ((long_lasts - long_begins) * val_fraction).astype(np.int64)
    held_out = np.stack([np.append(begins, long_lasts - tails), np.append(lasts, long_lasts)], axis=1)
    held_out = _not_empty(held_out)
    held_out = held_out[np.argsort(held_out[:, 0])]
    num_held_out = int(np.diff(held_out).sum())
    if not uncut and not window <= num_held_out <= count - window:
        return tail(count, val_fraction, sequence)
    whole_documents = counted(len(whole), "whole documents", ",")
    parts = [f"{whole_documents}, chosen by a hash of their place and run.seed"] * bool(len(whole))
    parts += [f"the end of {counted(len(long), 'long documents', ',')}"] * bool(len(long))
    return Split(_between(held_out, count), _joined(held_out), f"{num_held_out:,} tokens: {', '.join(parts)}")


def without(found: Split, ends: np.ndarray, copies: np.ndarray, sequence: int) -> Split:
    """Leave copies of held-out documents out of training, unless nothing would be left to train on."""
    if not copies.size:
        return found
    train = _minus(found.train, _joined(np.stack(_bounds(ends, copies), axis=1)))
    many = counted(len(copies), "documents", ",")
    if np.diff(train).sum() <= sequence:
        why = "are copies of them, without which it is too short"
        return found._replace(description=f"{found.description}; of the training text {many} {why}")
    description = f"{found.description}; {many} that are copies of them are left out of training"
    return found._replace(train=train, description=description)


def within(stretches: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Return the parts of stretches that lie between two tokens."""
    return _not_empty(np.clip(stretches, begin, end))


def _not_empty(stretches: np.ndarray) -> np.ndarray:
    return stretches[stretches[:, 1] > stretches[:, 0]]


def _minus(stretches: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return stretches without parts of them; both are in order."""
    rest = _between(parts, int(stretches[-1, 1]) if len(stretches) else 0)
    both = (stretches, rest), (rest, stretches)
    begins = [one[are_within(one[:, 0], one[:, 0] + 1, other), 0] for one, other in both]
    lasts = [one[are_within(one[:, 1] - 1, one[:, 1], other), 1] for one, other in both]
    return np.stack([np.unique(np.concatenate(begins)), np.unique(np.concatenate(lasts))], axis=1)


def are_within(begins: np.ndarray, ends: np.ndarray, stretches: np.ndarray) -> np.ndarray:
    """Return which parts, of which begins and ends are given, lie within one of the stretches."""
    if not len(stretches):
        return np.zeros(len(begins), bool)
    number = np.searchsorted(stretches[:, 0], begins, side="right") - 1
    return (number >= 0) & (ends <= stretches[number, 1])


def tail(count: int, val_fraction: float, sequence: int) -> Split:
    """Hold out the last `val_fraction` of the tokens, at least one sequence; training keeps one, too."""
    _require_enough(count, val_fraction, sequence)
    window = sequence + 1
    held_out = min(max(int(count * val_fraction), window), count - window)
    return _at(count, count - held_out, "the end of the text")


def apart(ends: np.ndarray, num_training: int, sequence: int) -> Split:
    """Hold out the documents after the first ones, which are those of data.val_path."""
    count = int(ends[-1])
    window = sequence + 1
    place = int(ends[num_training - 1]) if num_training else 0
    for key, found in (("data.path", place), ("data.val_path", count - place)):
        if found < window:
            needed = f"data.sequence = {sequence} needs {window} tokens, {key} has {found}"
            without = ", without what is in data.val_path" * (key == "data.path")
            raise DataError(f"{needed}{without}; use a smaller data.sequence or more text")
    return _at(count, place, "those of data.val_path")


def _at(count: int, place: int, which: str) -> Split:
    description = f"{count - place:,} tokens: {which}"
    return Split(np.array([[0, place]]), np.array([[place, count]]), description)


def _require_enough(count: int, val_fraction: float, sequence: int) -> None:
    if not 0 < val_fraction < 1:
        raise DataError(f"data.val_fraction = {val_fraction}; it must lie between 0 and 1, such as 0.05")
    if sequence < 1:
        raise DataError(f"data.sequence = {sequence}; it must be at least 1")
    window = sequence + 1  # inputs and, one further, targets
    if count < 2 * window:
        raise DataError(
            f"data.sequence = {sequence} needs {2 * window} tokens (one sequence to train on and one to "
            f"validate with), the corpus has {count}; use a smaller data.sequence or more text"
        )


def _bounds(ends: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where some documents begin and end."""
    begins = np.where(numbers, ends[np.maximum(numbers - 1, 0)], 0)
    return begins, np.asarray(ends[numbers])


class _Chosen:
    """Which documents are held out: the first, in the order of their hashes, that have a share of the tokens.

    Only those near the last one that is chosen are sorted.
    long: documents longer than all that is held out, of which a part may be.
    """

    def __init__(self, ends: np.ndarray, val_fraction: float, seed: int, uncut: Sequence[tuple[int, int]]):
        self._ends = ends
        self._uncut = uncut
        self._share = val_fraction
        self._seed = seed
        self._longest = int(ends[-1]) * val_fraction
        sums = np.zeros(GROUPS, np.int64)
        long = []
        for numbers, lengths, hashes in self._blocks():
            short = lengths <= self._longest
            long.append(numbers[~short & ~self._are_uncut(numbers)])
            np.add.at(sums, hashes[short] >> SHIFT, lengths[short])
        self.long = np.concatenate(long)
        self._sums = np.cumsum(sums)

    def whole(self) -> np.ndarray:
        """Return the short documents that are chosen, in the order of their hashes within the last group."""
        if not self._sums[-1]:
            return np.empty(0, np.int64)
        needed = int(self._sums[-1]) * self._share
        last = int(np.searchsorted(self._sums, needed))
        before, group = [], []
        for numbers, lengths, hashes in self._blocks():
            groups = hashes >> SHIFT
            short = lengths <= self._longest
            before.append(numbers[short & (groups < last)])
            here = short & (groups == last)
            group.append(np.stack([x[here].astype(np.uint64) for x in (hashes, numbers, lengths)]))
        hashes, numbers, lengths = np.concatenate(group, axis=1)
        order = np.argsort(hashes, kind="stable")
        earlier = int(self._sums[last - 1]) if last else 0
        sums = earlier + np.cumsum(lengths[order].astype(np.int64))
        chosen = order[: int(np.searchsorted(sums, needed)) + 1]
        return np.concatenate([*before, numbers[chosen].astype(np.int64)])

    def first_uncut(self) -> np.ndarray:
        """Return the first conversation in the order of hashes. Raises DataError if there is nothing else."""
        if len(self._ends) == 1:
            raise DataError("data.path has one conversation: none is left to validate with; give another one")
        least = [
            min(zip(hashes[uncut].tolist(), numbers[uncut].tolist(), strict=True))
            for numbers, _, hashes in self._blocks()
            if (uncut := self._are_uncut(numbers)).any()
        ]
        return np.array([min(least)[1]])

    def _are_uncut(self, numbers: np.ndarray) -> np.ndarray:
        parts = [(first <= numbers) & (numbers < end) for first, end in self._uncut]
        return np.any(parts, axis=0) if parts else np.zeros(len(numbers), bool)

    def _blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield number, length and hash of documents."""
        for begin in range(0, len(self._ends), BLOCK):
            ends = np.array(self._ends[begin : begin + BLOCK])
            first = int(self._ends[begin - 1]) if begin else 0
            numbers = np.arange(begin, begin + len(ends))
            yield numbers, np.diff(ends, prepend=first), _hashes(numbers, self._seed)


def _hashes(places: np.ndarray, seed: int) -> np.ndarray:
    """Hash places with a seed: splitmix64, the same on every machine and in every version of NumPy."""
    mixed = (np.array([seed], np.uint64) * np.uint64(0xD1B54A32D192ED03)) ^ places.astype(np.uint64)
    mixed = (mixed + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _between(stretches: np.ndarray, count: int) -> np.ndarray:
    """Return what lies between stretches, which are in order."""
    return _not_empty(np.stack([np.append(0, stretches[:, 1]), np.append(stretches[:, 0], count)], axis=1))


def _joined(stretches: np.ndarray) -> np.ndarray:
    """Return the same tokens in as few stretches as there can be."""
    apart = stretches[1:, 0] > stretches[:-1, 1]
    return np.stack([stretches[np.append(True, apart), 0], stretches[np.append(apart, True), 1]], axis=1)

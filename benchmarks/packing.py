"""Packed rows beside padded ones: time a token, in one run; and what balancing packed rows could gain.

    python benchmarks/packing.py [--sequence 512] [--width 256] [--steps 5]

Documents have log-normal lengths, a median of a fifth of a row. A padded row has one document. Both kinds of
row go through the same model with a document mask, in turns; times are medians, of this process's processor
time. The last lines are of data.documents = "packed": (query, key) pairs that see each other, of the busiest
of 8 ranks over the mean of all, as the order deals rows, and dealt longest first; and the time of a step on
the rows with most pairs over that on the rows with fewest.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from mpi4py import MPI

from mpitrain import config
from mpitrain.actor.actor import Actor
from mpitrain.actor.communicators import build_mesh
from mpitrain.data.packed_rows import BLOCK, PackedSampler, best_fit, pieces_of
from mpitrain.data.token_rows import Text
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.settings.resolve import resolve

ROWS, RANKS, ROWS_OF_RANK = 8, 8, 4
Pieces = list[tuple[int, int]]


def text_of(sequence: int) -> Text:
    """Return random tokens in documents of log-normal lengths."""
    dice = np.random.default_rng(0)
    lengths = np.minimum(dice.lognormal(np.log(sequence / 5), 1, 4000).astype(int) + 2, sequence + 1)
    ends = np.cumsum(lengths)
    return Text(dice.integers(0, 256, ends[-1]), None, ends)


def plan_line(sequence: int) -> str:
    """Return how full rows of a block of documents are, and how long it takes to plan them."""
    lengths = np.random.default_rng(1).lognormal(np.log(sequence / 5), 1, BLOCK).astype(int) + 2
    ends = np.cumsum(lengths)
    times = []
    for _ in range(7):
        begin = time.process_time()
        begins, lasts = pieces_of(ends - lengths, ends, sequence)
        rows = best_fit(lasts - begins, sequence + 1)
        times.append(1e3 * (time.process_time() - begin))
    fill = (lasts - begins).sum() / ((rows.max() + 1) * (sequence + 1))
    return f"a block of {BLOCK:,} documents: fill {fill:.4f}, planned in {statistics.median(times):.0f} ms"


def pairs_of(pieces: Pieces) -> int:
    """Return how many (query, key) pairs of a row see each other."""
    return sum((end - begin - 1) * (end - begin) // 2 for begin, end in pieces)


class Steps:
    """Steps of one model on rows that are given."""

    def __init__(self, sequence: int, width: int):
        keys = {"model.layers": 4, "model.width": width, "model.heads": width // 64, "model.ffn": 3 * width}
        keys |= {"data.sequence": sequence, "data.documents": "packed"}
        keys |= {"batch.global": ROWS, "batch.micro": 2, "model.vocab": 256}
        asked = config.load(None, tuple(f"{key}={value}" for key, value in keys.items()))
        plan = plan_of(resolve(asked, 1, 256))
        self._actor = Actor(plan, build_mesh(plan, MPI.COMM_WORLD), torch.device("cpu"))
        self._length = sequence + 1

    def seconds(self, text: Text, rows: list[Pieces]) -> tuple[float, int]:
        """Return the processor time of a step, and how many tokens it trained."""
        found = text.packed(rows, self._length)
        tensors = (torch.from_numpy(x) for x in (found.tokens, found.ends, found.scored[:, 1:]))
        microbatches = self._actor.cutter.cut(*tensors)
        begin = time.process_time()
        result = self._actor.run_step(1, microbatches, 1e-3)
        return time.process_time() - begin, result.num_tokens


def in_turns(steps: Steps, text: Text, kinds: dict[str, list[Pieces]], turns: int) -> dict[str, float]:
    """Return the median time of a trained token of each kind of rows, in microseconds."""
    times = {name: [] for name in kinds}
    for turn in range(turns + 1):
        for name, rows in kinds.items():
            seconds, tokens = steps.seconds(text, rows)
            if turn:
                times[name].append(1e6 * seconds / tokens)
    return {name: statistics.median(found) for name, found in times.items()}


def spread(pairs: list[int]) -> tuple[float, float]:
    """Return the busiest rank's pairs over the mean: rows dealt in their order, and longest first."""
    loads = np.array(pairs).reshape(RANKS, -1).sum(1)
    balanced, counts = np.zeros(RANKS), np.zeros(RANKS)
    for one in sorted(pairs, reverse=True):
        free = np.flatnonzero(counts < len(pairs) // RANKS)
        rank = free[np.argmin(balanced[free])]
        balanced[rank] += one
        counts[rank] += 1
    return loads.max() / loads.mean(), balanced.max() / balanced.mean()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("sequence", 512), ("width", 256), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(plan_line(given.sequence))
    text = text_of(given.sequence)
    packed = PackedSampler(text, given.sequence, seed=1)
    rows = [packed.pieces(slot) for slot in range(min(packed.num_sequences, RANKS * ROWS_OF_RANK * 8))]
    padded = [[(int(begin), int(last))] for begin, last in zip(*text.documents(np.arange(ROWS)), strict=True)]
    steps = Steps(given.sequence, given.width)
    of_kind = in_turns(steps, text, {"packed": rows[:ROWS], "padded": padded}, given.steps)
    ratio = of_kind["padded"] / of_kind["packed"]
    print(
        f"a trained token: packed {of_kind['packed']:.1f} us, padded {of_kind['padded']:.1f} us: {ratio:.2f}"
    )
    batches = range(0, len(rows) - RANKS * ROWS_OF_RANK + 1, RANKS * ROWS_OF_RANK)
    spreads = [spread([pairs_of(row) for row in rows[at : at + RANKS * ROWS_OF_RANK]]) for at in batches]
    plain, balanced = np.mean(spreads, 0)
    dealt = f"{plain:.3f}, dealt longest first {balanced:.3f}"
    print(f"pairs of the busiest of {RANKS} ranks over the mean: {dealt}")
    by_pairs = sorted(rows, key=pairs_of)
    most, fewest = by_pairs[-ROWS:], by_pairs[:ROWS]
    step = in_turns(steps, text, {"most": most, "fewest": fewest}, given.steps)
    more = sum(map(pairs_of, most)) / sum(map(pairs_of, fewest))
    print(
        f"rows with {more:.1f} times the pairs take {step['most'] / step['fewest']:.3f} times as long a token"
    )


main()

"""Packed rows beside padded ones: time a token, in one run; and what their attention costs.

    python benchmarks/packing.py [--sequence 512] [--width 256] [--steps 5]

Documents have log-normal lengths, a median of a fifth of a row. A padded row has one document. All kinds of
row go through the same model, in turns; times are medians, of this process's processor time.

    attention           forward and backward of 4 packed rows, by documents and whole under a mask
    most, fewest        a step on the rows with most (query, key) pairs over one on the rows with fewest
    balanced            the busiest of 8 ranks over the mean of all, in pairs and in time of a step, with rows
                        as the order has them, and as batches have them (mpitrain/data/balance.py)
    zigzag              the busiest of c ranks of cp over the mean, in pairs: chunks of whole rows
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
from mpitrain.data.balance import balanced_order
from mpitrain.data.packed_rows import BLOCK, BlockPlan, PackedSampler
from mpitrain.data.token_rows import Text
from mpitrain.kernels.attention import AttentionRequest
from mpitrain.kernels.document_spans import spans_of
from mpitrain.model.attention_functions import attention
from mpitrain.model.families.catalog import plan_of
from mpitrain.model.kv_history import mask
from mpitrain.plan.division.sequence import SequencePlacement
from mpitrain.plan.settings.resolve import resolve

ROWS, RANKS = 4, 8
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
        plan = BlockPlan.of(ends - lengths, ends, sequence)
        times.append(1e3 * (time.process_time() - begin))
    filled = [sum(last - begin for begin, last in plan.pieces(row)) for row in range(plan.num_rows)]
    fill = statistics.mean(filled) / (sequence + 1)
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


def attention_line(rows: list[Pieces], sequence: int, width: int, dtype: torch.dtype, turns: int) -> str:
    """Return how long attention of packed rows takes by documents, and under a mask."""
    heads = width // 64
    lengths = [torch.tensor([last - begin for begin, last in row]) for row in rows]
    documents = torch.stack([_numbers(of_row, sequence) for of_row in lengths])
    leaves = [torch.randn(len(rows), sequence, heads, 64, dtype=dtype).transpose(1, 2) for _ in range(4)]
    q, k, v, grad = (x.requires_grad_() for x in leaves)
    masked = AttentionRequest(mask=mask(0, sequence, documents, dtype, torch.device("cpu")))
    requests = {"documents": AttentionRequest(spans=spans_of(documents)), "mask": masked}
    times = {name: [] for name in requests}
    for turn in range(turns + 1):
        for name, request in requests.items():
            begin = time.process_time()
            out, _ = attention(q, k, v, request, False, False)
            torch.autograd.grad(out, (q, k, v), grad.detach())
            if turn:
                times[name].append(1e3 * (time.process_time() - begin))
    one, other = (statistics.median(times[name]) for name in requests)
    kind = str(dtype).removeprefix("torch.")
    return f"attention, {kind}: by documents {one:.1f} ms, under a mask {other:.1f} ms: {other / one:.2f}"


def _numbers(lengths: torch.Tensor, sequence: int) -> torch.Tensor:
    """Return the document of each position of a row; what is after the last one is one more."""
    inputs = torch.arange(len(lengths)).repeat_interleave(lengths)[:sequence]
    return torch.nn.functional.pad(inputs, (0, sequence - len(inputs)), value=len(lengths))


def busiest(loads: list[float]) -> float:
    """Return the busiest rank's load over the mean."""
    return max(loads) / statistics.mean(loads)


def balance_line(steps: "Steps", text: Text, rows: list[Pieces]) -> str:
    """Return how much more the busiest rank has than the mean: rows in their order, and balanced."""
    found = {"order": ([], []), "balanced": ([], [])}
    for at in range(0, len(rows) - RANKS * ROWS + 1, RANKS * ROWS):
        batch = rows[at : at + RANKS * ROWS]
        balanced = [batch[row] for row in balanced_order([pairs_of(row) for row in batch])]
        for (pairs, times), dealt in zip(found.values(), (batch, balanced), strict=True):
            shares = [dealt[rank * ROWS : (rank + 1) * ROWS] for rank in range(RANKS)]
            pairs.append(busiest([sum(map(pairs_of, share)) for share in shares]))
            steps.seconds(text, shares[0])
            times.append(busiest([steps.seconds(text, share)[0] for share in shares]))
    words = (
        f"{name} {statistics.mean(pairs):.3f} in pairs, {statistics.mean(times):.3f} in time"
        for name, (pairs, times) in found.items()
    )
    return f"the busiest of {RANKS} ranks over the mean: {'; '.join(words)}"


def zigzag_line(rows: list[Pieces], sequence: int) -> str:
    """Return the pairs of the busiest rank of cp over the mean, of all rows."""
    costs = [
        np.concatenate([np.arange(1, last - begin) for begin, last in row] + [np.zeros(sequence)])[:sequence]
        for row in rows
    ]
    words = []
    for size in (2, 4, 8):
        placement = SequencePlacement("zigzag", sequence // (2 * size) * 2 * size, size)
        loads = np.array([[of_row[placement.positions(r)].sum() for r in range(size)] for of_row in costs])
        words.append(f"cp {size} {loads.max(1).sum() / loads.mean(1).sum():.3f}")
    return f"zigzag over whole rows, the busiest rank over the mean in pairs: {', '.join(words)}"


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
    rows = [packed.pieces(slot) for slot in range(min(packed.num_sequences, RANKS * ROWS * 2))]
    padded = [[(int(begin), int(last))] for begin, last in zip(*text.documents(np.arange(ROWS)), strict=True)]
    steps = Steps(given.sequence, given.width)
    of_kind = in_turns(steps, text, {"packed": rows[:ROWS], "padded": padded}, given.steps)
    ratio = of_kind["padded"] / of_kind["packed"]
    print(
        f"a trained token: packed {of_kind['packed']:.1f} us, padded {of_kind['padded']:.1f} us: {ratio:.2f}"
    )
    for dtype in (torch.float32, torch.bfloat16):
        print(attention_line(rows[:4], given.sequence, given.width, dtype, given.steps))
    print(balance_line(steps, text, rows))
    print(zigzag_line(rows, given.sequence))
    by_pairs = sorted(rows, key=pairs_of)
    most, fewest = by_pairs[-ROWS:], by_pairs[:ROWS]
    step = in_turns(steps, text, {"most": most, "fewest": fewest}, given.steps)
    more = sum(map(pairs_of, most)) / sum(map(pairs_of, fewest))
    print(
        f"rows with {more:.1f} times the pairs take {step['most'] / step['fewest']:.3f} times as long a token"
    )


main()

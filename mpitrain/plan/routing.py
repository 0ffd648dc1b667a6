"""Routing traces: which experts each token of a run was sent to, recorded and replayed. No torch.

A file holds for each block with experts, by the name of its load, experts of [steps, sequences of a
step, positions, experts of a token], and the number of the first step, 1 where it has none: it
knows nothing of ranks and microbatches, so that a run on other ranks can replay it. Steps that it
lacks, before the first or after the last, take those that it has in turn.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mpitrain.inputs import replacing
from mpitrain.plan.declared.resolved import ResolvedConfig

FIRST = "first_step"


@dataclass(frozen=True)
class RoutingTrace:
    """The experts of a run's tokens, by the name of a block's load, [S, sequences, T, K].

    first: the step of the first of S.
    """

    experts: Mapping[str, np.ndarray]
    first: int = 1

    @property
    def steps(self) -> int:
        return min(map(len, self.experts.values()), default=0)

    @cached_property
    def digest(self) -> str:
        hasher = hashlib.sha256(str(self.first).encode())
        for name in sorted(self.experts):
            hasher.update(name.encode() + np.ascontiguousarray(self.experts[name]).data)
        return hasher.hexdigest()[:16]

    def place(self, step: int) -> int:
        """Return which of S is replayed in a step."""
        return (step - self.first) % self.steps

    def lacks(self, steps: range) -> str:
        """Return what is to be said if there are other steps among these."""
        mine = range(self.first, self.first + self.steps)
        lacking = next((step for step in (*steps[:1], *steps[-1:]) if step not in mine), None)
        if lacking is None:
            return ""
        return (
            f"experts.replay has steps {mine[0]} to {mine[-1]}: the others take these in turn, "
            f"step {lacking} goes where step {mine[self.place(lacking)]} went"
        )

    def write(self, path: Path) -> None:
        """Write a file that plan/routing_file.py reads. Raises OSError."""
        with replacing(path) as file:
            arrays = {FIRST: np.array(self.first), **self.experts}
            np.savez(file, **arrays)  # type: ignore[arg-type]  # mypy: one could be allow_pickle; none is


@dataclass(frozen=True)
class Routes:
    """The routing of one microbatch, of sequences `rows`: what is replayed, and where it is recorded."""

    step: int
    rows: range
    replayed: RoutingTrace | None = None
    recorded: list[tuple[str, range, np.ndarray, np.ndarray]] | None = None

    def chosen(self, name: str, positions: np.ndarray) -> np.ndarray | None:
        """Return the experts of the positions of a block, [rows, T, K], if they are replayed.

        positions: [T], or [rows, T].
        """
        if self.replayed is None:
            return None
        of_step = self.replayed.experts[name][self.replayed.place(self.step)]
        experts: np.ndarray = of_step[np.arange(self.rows.start, self.rows.stop)[:, None], positions]
        return experts

    def record(self, name: str, positions: np.ndarray, experts: np.ndarray) -> None:
        """Note the experts of some positions, [rows, T, K]."""
        if self.recorded is not None:
            self.recorded.append((name, self.rows, positions, experts.astype(np.uint16)))


def joined(
    config: ResolvedConfig, recorded: Mapping[int, list[tuple[str, range, np.ndarray, np.ndarray]]]
) -> RoutingTrace:
    """Return the trace of steps that follow one another, each recorded in parts."""
    shape = len(recorded), config.batch.global_, config.data.sequence, config.experts.active
    experts: dict[str, np.ndarray] = {}
    for place, step in enumerate(sorted(recorded)):
        for name, rows, positions, experts_of_rows in recorded[step]:
            of_rows = experts.setdefault(name, np.zeros(shape, np.uint16))[place][rows.start : rows.stop]
            of_rows[np.arange(len(of_rows))[:, None], positions] = experts_of_rows
    return RoutingTrace(experts, min(recorded))

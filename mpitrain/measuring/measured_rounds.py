"""Rounds of measurements until the best values agree, and what shows that a machine was disturbed.

A processor that others use is slow for seconds at a time, so a slow round is left out of a figure.
If no two rounds agree, or other programs had the cores all the time, the figures can't be trusted.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from mpitrain.measuring.device import Samples

LEAST_ROUNDS, MOST_ROUNDS = 3, 8
AGREE = 0.1  # of the best value of a figure, that a round's best may be off
MOST_LOST = 0.1  # of a rank's time, in which others have its core
ENOUGH = 2  # rounds that agree, and that nothing disturbs


class CoreTime(NamedTuple):
    """Seconds of this thread and machine: it ran, it was ready and had no core, a hypervisor had the core."""

    ran: float
    waited: float
    stolen: float

    @classmethod
    def now(cls) -> "CoreTime | None":
        """Return the times so far; None where the system doesn't say them."""
        try:
            ran, waited, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
            stolen = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
        except (OSError, ValueError, IndexError):
            return None
        ticks = os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        return cls(ran / 1e9, waited / 1e9, stolen / ticks)

    def lost_since(self, before: "CoreTime") -> float:
        """Return the share of a rank's time in which it could have run and others had its core."""
        ran, waited, stolen = (mine - earlier for mine, earlier in zip(self, before))
        return (waited + stolen) / max(ran + waited, 1e-9)


class MeasuredRounds(NamedTuple):
    """Values of each figure, a list for each round. lost: of each round, as lost_since() says it."""

    values: dict[str, list[list[float]]]
    lost: list[float]

    def samples(self) -> list[Samples]:
        """Return the values of rounds that agree with the best one."""
        return [
            Samples(name, [value for some in agreeing(name, rounds) for value in some])
            for name, rounds in self.values.items()
        ]

    def unsettled(self) -> list[str]:
        """Return the figures whose best round stands alone."""
        return [name for name, rounds in self.values.items() if len(agreeing(name, rounds)) < ENOUGH]

    def lost_more(self, expected: float) -> float:
        """Return by how much more than expected others had this rank's core; 0.0 if that is little.

        expected: share of the time that a rank waits for others of this job on its core.
        """
        if len(self.lost) < ENOUGH:
            return 0.0
        more = sorted(self.lost)[ENOUGH - 1] - expected
        return more if more > MOST_LOST else 0.0

    def count(self) -> int:
        return max(map(len, self.values.values()), default=0)


def doubts_of(lost_more: Sequence[float], unsettled: Sequence[Sequence[str]], num_rounds: int) -> list[str]:
    """Return why figures of some ranks can't be trusted, each reason once; nothing if they can.

    lost_more, unsettled: of each rank, as MeasuredRounds says them.
    """
    reasons = []
    if most := max(lost_more):
        reasons.append(f"other programs had the cores for {most:.0%} of the time")
    if names := dict.fromkeys(name for some in unsettled for name in some):
        reasons.append(f"no two of {num_rounds} rounds agree within {AGREE:.0%} in {', '.join(names)}")
    return reasons


def agreeing(name: str, rounds: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Return the rounds of a figure whose best value is near the best of all."""
    best = min if name.endswith("_s") else max
    top = best(best(some) for some in rounds)
    return [some for some in rounds if abs(best(some) - top) <= AGREE * top]


def measured_in_rounds(
    measure: Callable[[], Iterable[Samples]], on_all_ranks: Callable[[bool], bool]
) -> MeasuredRounds:
    """Measure in rounds until the best values of all figures agree, on all ranks. Collective.

    on_all_ranks: says whether something is true on each of them.
    """
    rounds = MeasuredRounds({}, [])
    for number in range(1, MOST_ROUNDS + 1):
        before = CoreTime.now()
        for name, values in measure():
            rounds.values.setdefault(name, []).append(values)
        after = CoreTime.now()
        if before and after:
            rounds.lost.append(after.lost_since(before))
        if number >= LEAST_ROUNDS and on_all_ranks(not rounds.unsettled()):
            break
    return rounds

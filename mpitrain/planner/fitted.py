"""The constant of a system, fitted to published steps: the logarithm of how much longer its steps take.

It begins with what other systems of the GPU say, which counts as some steps do; steps of other
numbers, or with experts, count little.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import shown
from mpitrain.plan.predict.step_time.machine import (
    CALIBRATED,
    LINKS,
    LONGEST_LATENCY_S,
    LONGEST_LAUNCH_S,
    Figure,
    MachineFile,
)
from mpitrain.planner.published_rows import Row

# standard deviations, in logarithms: of one system's constant from that of others on its GPU, and of a step
OF_A_SYSTEM, OF_A_STEP = 0.2, 0.1
CLEAR = 1.5  # deviations from which a step counts less (Huber's weights)
ROUNDS = 20  # after which the weights stay as they are
OTHER_REGIME = 6.0  # times as much for steps of other numbers, or with experts
NOT_IN_A_STEP = ("host", "storage")  # tables of a machine's file that no published step tells
MODELS = 2  # whose steps each tell how far off the others' constant is
LEAST_WIDE = 0.03  # of an interval, each way: steps of one machine differ by as much


class Sample(NamedTuple):
    """A step. seconds: predicted. model, regime: whose steps are alike."""

    seconds: float
    measured: float
    model: str = ""
    regime: str = ""

    @property
    def longer(self) -> float:
        """The logarithm of how much longer it took than predicted."""
        return math.log(self.measured / self.seconds)


def fit(samples: Sequence[Sample], start: float = 0.0, regime: str = "") -> float:
    """Return the constant of steps of a regime, near `start`, which few leave as it is."""
    steps = [
        (sample.longer, OF_A_STEP * (OTHER_REGIME if regime and sample.regime != regime else 1.0))
        for sample in samples
    ]
    constant = start
    for _ in range(ROUNDS):
        weights = [
            min(1.0, CLEAR * spread / max(abs(longer - constant), 1e-9)) / spread**2
            for longer, spread in steps
        ]
        total = start / OF_A_SYSTEM**2 + sum(weight * longer for weight, (longer, _) in zip(weights, steps))
        constant = total / (1 / OF_A_SYSTEM**2 + sum(weights))
    return constant


def calibrated(machine: MachineFile, constant: float, kernel: str, source: str) -> MachineFile:
    """Return a machine whose figures have the constant in them.

    kernel: of the steps' attention, which is now what `forward` and `backward` mean. source: who
    says so.
    """
    slower = math.exp(constant)
    replace = msgspec.structs.replace

    def of(key: str, figure: Figure) -> Figure:
        if key.partition(".")[0] in NOT_IN_A_STEP:
            return figure
        sustained = float(f"{min(figure.peak, figure.sustained / slower):.4g}")
        words = f"{figure.sustained_source}{CALIBRATED} {source}"
        return replace(figure, sustained=sustained, sustained_source=words)

    def later(seconds: float, longest: float) -> float:
        return min(longest, float(f"{seconds * slower:.4g}"))

    of_kernel = {way: machine.attention_of(way, kernel) for way in ("forward", "backward")}
    machine = replace(machine, attention={**machine.attention, **of_kernel}).with_figures(of)
    latencies = {
        f"{link}_latency_s": later(seconds, LONGEST_LATENCY_S)
        for link in LINKS
        if (seconds := getattr(machine.links, f"{link}_latency_s")) is not None
    }
    return replace(
        machine, name=f"{machine.name[:150]}, calibrated", aliases=[],
        links=replace(machine.links, **latencies),
        launch_s=later(machine.launch_s, LONGEST_LAUNCH_S[machine.device]),
    )  # fmt: skip


def machine_text(rows: Sequence[Row], samples: Sequence[Sample], source: str) -> str:
    """Return the TOML of the machine of some rows, with a constant fitted to them.

    Raises ConfigError for rows of several machines or frameworks, or of none with a time.
    """
    systems = sorted({row.whole_system for row in rows})
    if len(systems) != 1:
        found = ", ".join(systems[:4]) or "no row with a time"
        raise ConfigError(f"--out of a machine's file: found {shown(found)}; needed rows of one system")
    first = rows[0]
    words = f"to {counted(len(rows), 'steps')} of {source}"
    constant = fit(samples, regime=first.regime)
    machine = calibrated(first.machine, constant, first.convention.kernel, words)
    spread = _left(samples, first.regime)
    return msgspec.structs.replace(machine, spread=spread).to_toml()


def _left(samples: Sequence[Sample], regime: str) -> list[float]:
    """Return quantiles of what steps took over predictions by the other models' steps."""
    models = sorted({sample.model for sample in samples})
    if len(models) < MODELS:
        return []
    ratios = []
    for model in models:
        constant = fit([each for each in samples if each.model != model], regime=regime)
        ratios += [math.exp(each.longer - constant) for each in samples if each.model == model]
    middle = quantile(ratios, 0.5)
    low = min(quantile(ratios, 0.1), middle * (1 - LEAST_WIDE))
    high = max(quantile(ratios, 0.9), middle * (1 + LEAST_WIDE))
    return [float(f"{value:.3g}") for value in (low, middle, high)]


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, between neighbours by their distance; nan of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's correlation, ties sharing their ranks; nan where one doesn't vary."""
    a, b = _ranks(one), _ranks(other)
    mean = (len(a) - 1) / 2
    across = sum((x - mean) * (y - mean) for x, y in zip(a, b))
    spread = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return across / spread if spread else math.nan


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        (sum(other < value for other in values) + sum(other <= value for other in values) - 1) / 2
        for value in values
    ]

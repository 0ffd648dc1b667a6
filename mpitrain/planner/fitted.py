"""Constants of a system, fitted to published steps: how much longer each term of a step takes.

    level     every second of a step
    terms     products, attention, memory, launches, links inside nodes and between them

Each is a logarithm, near what it began with by a prior (a ridge): few steps move the level alone,
many tell terms apart. How a step's seconds are made of terms is what it gains where one of them
is faster.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import tomli_w

from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import shown
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.machine import (
    CALIBRATED,
    LINKS,
    LONGEST_LATENCY_S,
    LONGEST_LAUNCH_S,
    Figure,
    MachineFile,
    MachineRates,
)
from mpitrain.plan.predict.step_time.step import predict_step
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.planner.published_rows import Row

FIELDS = {  # of MachineRates, by term
    "products": ("products",),
    "attention": ("attention_forward", "attention_backward"),
    "memory": ("memory_bandwidth", "memory_passes"),
    "launches": ("launch_s",),
    "inside": ("inside", "pair", "inside_latency_s", "pair_latency_s"),
    "between": ("between", "between_latency_s"),
}
TERMS = tuple(FIELDS)
OTHER_FIELDS = (  # that no published step tells
    "attention_forward_16", "attention_backward_16", "attention_short", "host_update", "host_copy",
)  # fmt: skip
TERM_OF = {  # of figures of a machine's file, by their key or its table
    "products": "products", "attention": "attention", "memory": "memory",
    "links.inside": "inside", "links.pair": "inside", "links.between": "between",
}  # fmt: skip
# how far constants of one system are from those of the GPU type: of level and terms, in logarithms
PRIOR = (0.2, 0.1, 0.2, 0.2, 0.5, 0.3, 0.3)
OF_A_STEP = 0.05  # measured again it differs by as much (4 % in published steps)
OF_A_MODEL = 0.1  # that steps of one model have in common
OTHER_REGIME = 6.0  # times as much for steps of other numbers, or with experts
CLEAR = 1.5  # deviations from which a step counts less
ROUNDS = 6
SLOWER = 1.1  # a term, to see what a step takes with it

MODELS = 2  # whose steps each tell how far off the others' constants are
LEAST_WIDE = 0.03  # of an interval, each way: steps of one machine differ by as much


class Constants(NamedTuple):
    """level, terms: logarithms of how much longer they take. num_rows: that they were fitted to."""

    level: float = 0.0
    terms: tuple[float, ...] = (0.0,) * len(TERMS)
    num_rows: int = 0


class Sample(NamedTuple):
    """A step. seconds: predicted. shares: of terms. model, regime: whose steps are alike."""

    seconds: float
    shares: tuple[float, ...]
    measured: float
    model: str = ""
    regime: str = ""

    def at(self, constants: Constants) -> float:
        longer = sum(share * math.expm1(term) for share, term in zip(self.shares, constants.terms))
        return self.seconds * math.exp(constants.level) * (1 + longer)


NOTHING = Constants()


def shares_of(model: StepModel, layout: StepLayout, machine: MachineRates) -> tuple[float, ...]:
    """Return the share of each term in a step's seconds; what is left of 1 no term explains."""
    whole = predict_step(model, layout, machine, play=False).seconds
    slower = [machine.slower(SLOWER, fields) for fields in FIELDS.values()]
    longer = [predict_step(model, layout, each, play=False).seconds / whole for each in slower]
    found = [max(0.0, ratio - 1) / (SLOWER - 1) for ratio in longer]
    total = max(1.0, sum(found))
    return tuple(share / total for share in found)


def in_median(machine: MachineRates) -> MachineRates:
    """Return a machine whose steps are predicted to take what those of the given one take in the median."""
    fields = [*OTHER_FIELDS, *(field for fields in FIELDS.values() for field in fields)]
    return machine.slower(machine.spread.middle, fields)


def fit(samples: Sequence[Sample], start: Constants = NOTHING, regime: str = "") -> Constants:
    """Return the constants of steps of a regime, near `start`, which few leave as it is."""
    if not samples:
        return start
    shares = np.array([sample.shares for sample in samples])
    wanted = np.log([sample.measured / sample.seconds for sample in samples])
    of_model = Counter(sample.model for sample in samples)
    spread = np.array([_spread(sample, of_model, regime) for sample in samples])
    begin = np.array([start.level, *start.terms])
    prior = np.diag(1 / np.square(PRIOR))
    found = begin.copy()
    for _ in range(ROUNDS):  # Gauss and Newton; what is far off counts by Huber's weights
        parts = shares * np.exp(found[1:])
        whole = parts.sum(axis=1) + 1 - shares.sum(axis=1)
        slopes = np.column_stack([np.ones(len(samples)), parts / whole[:, None]])
        left = wanted - found[0] - np.log(whole)
        far = np.minimum(1.0, CLEAR * spread / np.maximum(np.abs(left), 1e-12))
        weights = far / np.square(spread)
        hessian = prior + slopes.T @ (weights[:, None] * slopes)
        gradient = prior @ (begin - found) + slopes.T @ (weights * left)
        found = found + np.linalg.solve(hessian, gradient)
    return Constants(float(found[0]), tuple(map(float, found[1:])), len(samples))


def _spread(sample: Sample, of_model: Mapping[str, int], regime: str) -> float:
    alike = math.hypot(OF_A_STEP, OF_A_MODEL * math.sqrt(of_model[sample.model]))
    return alike * (OTHER_REGIME if regime and sample.regime != regime else 1.0)


def calibrated(machine: MachineFile, constants: Constants, kernel: str, source: str) -> MachineFile:
    """Return a machine whose figures have the constants in them.

    kernel: of the steps' attention, which is now what `forward` and `backward` mean. source: who
    says so.
    """
    slower = {term: math.exp(constants.level + log) for term, log in zip(TERMS, constants.terms)}
    replace = msgspec.structs.replace

    def of(key: str, figure: Figure) -> Figure:
        term = TERM_OF.get(key) or TERM_OF.get(key.partition(".")[0])
        if term is None:
            return figure
        sustained = float(f"{min(figure.peak, figure.sustained / slower[term]):.4g}")
        words = f"{figure.sustained_source}{CALIBRATED} {source}"
        return replace(figure, sustained=sustained, sustained_source=words)

    def later(seconds: float, term: str, longest: float = LONGEST_LATENCY_S) -> float:
        return min(longest, float(f"{seconds * slower[term]:.4g}"))

    of_kernel = {
        way: machine.attention.get(f"{way}_{kernel}", machine.attention[way])
        for way in ("forward", "backward")
    }
    machine = replace(machine, attention={**machine.attention, **of_kernel}).with_figures(of)
    latencies = {
        f"{link}_latency_s": later(seconds, TERM_OF[f"links.{link}"])
        for link in LINKS
        if (seconds := getattr(machine.links, f"{link}_latency_s")) is not None
    }
    return replace(
        machine, name=f"{machine.name[:150]}, calibrated", aliases=[],
        links=replace(machine.links, **latencies),
        launch_s=later(machine.launch_s, "launches", LONGEST_LAUNCH_S[machine.device]),
    )  # fmt: skip


def machine_text(rows: Sequence[Row], samples: Sequence[Sample], source: str) -> str:
    """Return the TOML of the machine of some rows, with constants fitted to them.

    Raises ConfigError for rows of several machines or frameworks, or of none with a time.
    """
    systems = sorted({row.whole_system for row in rows})
    if len(systems) != 1:
        found = ", ".join(systems[:4]) or "no row with a time"
        raise ConfigError(f"--out of a machine's file: found {shown(found)}; needed rows of one system")
    first = rows[0]
    constants = fit(samples, NOTHING, first.regime)
    words = f"to {counted(len(rows), 'steps')} of {source}"
    machine = calibrated(first.machine, constants, first.convention.kernel, words)
    spread = _left(samples, first.regime)
    return tomli_w.dumps(msgspec.to_builtins(msgspec.structs.replace(machine, spread=spread)))


def _left(samples: Sequence[Sample], regime: str) -> list[float]:
    """Return quantiles of what steps took over predictions by the other models' steps."""
    models = sorted({sample.model for sample in samples})
    if len(models) < MODELS:
        return []
    ratios = []
    for model in models:
        constants = fit([each for each in samples if each.model != model], NOTHING, regime)
        ratios += [each.measured / each.at(constants) for each in samples if each.model == model]
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

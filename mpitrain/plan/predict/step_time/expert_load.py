"""How unevenly tokens load experts: rows of the rank of ep that has most, over the mean.

The others of ep wait for that rank in each block. The load is stated (run.expert_load), counted in
a routing trace (experts.replay), or an estimate.
"""

import math
from typing import NamedTuple

import numpy as np

from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.declared.step_layout import ExpertLoad, StepLayout
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.routing import RoutingTrace

# of a trace, spread over all: what tells them apart is small beside what tells blocks apart
MOST_STEPS = 8
# more for each doubling of ep: first weights and random tokens, 4 to 32 experts, 8 blocks of width 256 and
# 512, were at 1.15 to 1.28 on 2 ranks, 1.29 to 1.45 on 4, 1.5 and 1.9 on 8 (2026-11-28)
OF_FIRST_STEPS = 0.2


class StatedLoad(NamedTuple):
    """The same load of every layout, as far as its ranks can have it."""

    load: float
    source: str = "run.expert_load"

    def on(self, layout: StepLayout) -> float:
        return min(self.load, layout.ep)


class CountedLoad:
    """The load that a layout has with known choices of tokens, the mean over microbatches, blocks and steps.

    Ranks of ep that share a data rank's sequences count as if each had a part of all of them.

    counts_NBE: how often each expert was chosen, [steps and blocks, sequences of a step, experts].
    """

    def __init__(self, counts_NBE: np.ndarray, source: str = "experts.replay"):
        self.source = source
        self._counts_NBE = counts_NBE
        self._loads = dict[tuple[int, int, int, int], float]()

    def on(self, layout: StepLayout) -> float:
        folded = layout.etp * layout.ep
        together = max(1, folded // (layout.tp * layout.cp))  # data ranks whose rows meet
        if layout.dp % together:
            together = 1
        division = layout.dp, together, layout.micro, layout.ep
        if division not in self._loads:
            self._loads[division] = self._counted(*division)
        return self._loads[division]

    def _counted(self, dp: int, together: int, micro: int, ep: int) -> float:
        num, batch, count = self._counts_NBE.shape
        of_ranks = self._counts_NBE.reshape(num, batch, ep, count // ep).sum(-1)
        meeting = of_ranks.reshape(num, dp // together, together, batch // (dp * micro), micro, ep)
        rows = meeting.sum(axis=(2, 4))
        return float(rows.max(-1).mean() / rows.mean())


def counts_of(experts_BTK: np.ndarray, count: int) -> np.ndarray:
    """Return how often tokens of each sequence chose each of `count` experts, [B, E]."""
    batch = len(experts_BTK)
    first_of_sequence = count * np.arange(batch)[:, None]
    places = experts_BTK.reshape(batch, -1).astype(np.int64) + first_of_sequence
    return np.bincount(places.ravel(), minlength=batch * count).reshape(batch, count)


def _counts_of_trace(trace: RoutingTrace, count: int) -> np.ndarray:
    stride = math.ceil(trace.steps / MOST_STEPS)
    return np.stack(
        [
            counts_of(of_step, count)
            for experts in trace.experts.values()
            for of_step in experts[: trace.steps : stride]
        ]
    )


def expert_load(config: ResolvedConfig, trace: RoutingTrace | None) -> ExpertLoad | None:
    """Return the load that a configuration states or replays; None: it is to be estimated.

    trace: of experts.replay.
    """
    if config.run.expert_load:
        return StatedLoad(config.run.expert_load)
    return None if trace is None else CountedLoad(_counts_of_trace(trace, config.experts.count))


def load_of_fullest(layout: StepLayout, machine: MachineRates) -> float:
    """Return rows of the rank of ep whose experts have most, over the mean of all that are chosen."""
    if layout.ep == 1:
        return min(1.0, layout.capacity or 1.0)
    # a GPU's rates were fitted to published steps, which have theirs in them
    found = 1.0 if machine.on_gpu else 1 + OF_FIRST_STEPS * math.log2(layout.ep)
    if layout.expert_load is not None:
        found = layout.expert_load.on(layout)
    return min(found, layout.capacity) if layout.capacity else found

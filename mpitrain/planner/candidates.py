"""The layouts that a search tries: configurations that leave nothing of their layout open.

What the user gave stays; the rest follows the rules of the field. Whether one can be trained is
asked of resolve() alone (plan/settings/resolve.py).
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mpitrain import config as settings
from mpitrain.config import Config
from mpitrain.origins import Origins
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.declared.step_layout import MICROS, ExpertLoad, StepLayout
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.plan.settings.job_ranks import JobRanks
from mpitrain.plan.settings.resolve import resolve
from mpitrain.schedules import catalog

LONG = 16384  # positions from which cp is tried
# tp is tried on so many ranks though their nodes are smaller: of a small batch the gradients of more data
# ranks take longer than tp's messages between nodes
SPANNED = 8
CONTEXT, GATHER = "zigzag", "auto"  # kinds that others must be faster than
KEYS = (  # that a search chooses, where they are open
    "parallel.tp", "parallel.cp", "parallel.pp", "parallel.dp", "parallel.ep", "parallel.etp",
    "parallel.zero", "parallel.dp_shard", "batch.micro", "parallel.context", "parallel.gather",
    "parallel.regather", "memory.recompute", "pipeline.schedule", "pipeline.chunks",
)  # fmt: skip
KEYS_OF_AXIS = {
    "tp": ("parallel.tp",), "cp": ("parallel.cp", "parallel.context"), "dp": ("parallel.dp_shard",),
    "ep": ("parallel.ep",), "etp": ("parallel.ep", "parallel.etp"),
    "pp": ("pipeline.schedule", "pipeline.chunks"),
}  # fmt: skip
# of the others 0 means that they are open
MEANING_0 = ("parallel.zero", "parallel.dp_shard", "parallel.regather")

FixedKeys = Mapping[str, Any]


class SearchSpace(NamedTuple):
    """A configuration whose layout is open, and what it is for.

    given: with a batch. fixed: keys of KEYS that stay as given. vocab, needed: as resolve() takes
    them. expert_load: as stated or replayed, of all layouts. may_offload: memory.offload is open,
    and of a GPU, whose host has memory of its own.
    """

    given: Config
    fixed: FixedKeys
    ranks: int
    machine: MachineRates
    vocab: int
    needed: int | None = None
    expert_load: ExpertLoad | None = None
    may_offload: bool = False

    def resolved(self, config: Config) -> ResolvedConfig:
        """Return a configuration as a run on the machine resolves it. Raises ConfigError, as a run does."""
        ranks = JobRanks.filling(self.ranks, self.machine.ranks_per_node)
        return resolve(config, ranks, self.vocab, self.needed)

    def layout_of(self, resolved: ResolvedConfig) -> StepLayout:
        return layout_of(resolved, self.machine)._replace(expert_load=self.expert_load)

    def choices(self, key: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the values of a key that are tried: that which is fixed, or these."""
        return (self.fixed[key],) if key in self.fixed else values


def fixed_keys(config: Config, origins: Origins) -> FixedKeys:
    """Return the keys of a layout that the user gave, with their values."""
    flat = settings.flatten(config)
    given = (key for key in KEYS if origins.is_given(key))
    return {key: flat[key] for key in given if flat[key] or key in MEANING_0}


def candidates(space: SearchSpace, model: StepModel) -> Iterator[Config]:
    """Yield configurations by the rules of the field: tp and etp within a node or on 8 ranks, ZeRO-1 always.

    Those that gather tp's inputs again aren't among them: a search makes one of another.
    """
    batch = space.given.batch.global_
    modes = space.choices("memory.recompute", ("none", "selective", "full"))
    for tp, cp, pp in _degrees(space, model):
        dp = space.ranks // (tp * cp * pp)
        for zero, sharded in _zeros(space, dp * cp, pp, tp):
            for ep, etp in _experts(space, model, space.ranks // pp, tp):
                for schedule, chunks in _schedules(space, model, pp):
                    for micro in space.choices("batch.micro", MICROS):
                        divides = batch % (dp * micro) == 0
                        for recompute in modes if divides else modes[:1]:  # one is refused for all
                            layout = {
                                "parallel.tp": tp, "parallel.cp": cp, "parallel.pp": pp, "parallel.dp": dp,
                                "parallel.ep": ep, "parallel.etp": etp, "parallel.zero": zero,
                                "parallel.dp_shard": sharded, "pipeline.schedule": schedule,
                                "pipeline.chunks": chunks, "batch.micro": micro,
                                "memory.recompute": recompute,
                            }  # fmt: skip
                            yield from _by_kind(space, model, settings.with_values(space.given, layout))


def _by_kind(space: SearchSpace, model: StepModel, config: Config) -> Iterator[Config]:
    """Yield a configuration with each kind of cp and of ZeRO-3's gathers that can matter.

    ring isn't tried: it sends what zigzag does, and leaves causal attention unbalanced. Ulysses
    isn't beyond a rank's key-value heads: it would send copies of them.
    """
    parallel, batch = config.parallel, config.batch
    contexts: tuple[str, ...] = (parallel.context,)
    if parallel.cp > 1:
        whole_heads = parallel.cp <= model.sizes.kv_heads // parallel.tp
        contexts = space.choices("parallel.context", (CONTEXT, "gather", *["ulysses"] * whole_heads))
    gathers: tuple[str, ...] = (parallel.gather,)
    fetches_often = batch.global_ > batch.micro * parallel.dp
    if parallel.zero == 3 and parallel.pp == 1 and fetches_often:
        gathers = space.choices("parallel.gather", (GATHER, "step"))
    for context in contexts:
        for gather in gathers:
            yield settings.with_values(config, {"parallel.context": context, "parallel.gather": gather})


def _degrees(space: SearchSpace, model: StepModel) -> Iterator[tuple[int, int, int]]:
    node = min(space.machine.ranks_per_node, space.ranks)
    tps = tuple(sorted({*_divisors(node), *(tp for tp in _divisors(SPANNED) if node < tp <= space.ranks)}))
    sequence = space.given.data.sequence
    longest = sequence // (LONG // 2) if sequence >= LONG else 1
    cps = tuple(cp for cp in (1, 2, 4, 8, 16, 32) if cp <= longest)
    for tp in space.choices("parallel.tp", tps):
        for cp in space.choices("parallel.cp", cps):
            if space.ranks % (tp * cp):
                continue
            rest = space.ranks // (tp * cp)
            pps = tuple(pp for pp in _divisors(rest) if pp <= min(model.sizes.layers, 64))
            for pp in space.choices("parallel.pp", pps):
                if rest % pp == 0 and space.fixed.get("parallel.dp", rest // pp) == rest // pp:
                    yield tp, cp, pp


def _zeros(space: SearchSpace, data: int, pp: int, tp: int) -> list[tuple[int, int]]:
    """Return ZeRO's stages with the ranks that share state; 3 alone where gathers are fixed."""
    stages = [(0, 0)] if data == 1 else [(1, 0)]
    if {"parallel.zero", "parallel.dp_shard"} & set(space.fixed):
        shared = space.fixed.get("parallel.dp_shard", 0)
        stages = [(zero, shared) for zero in space.choices("parallel.zero", (1, 3)[: 1 + (pp == 1)])]
    elif data > 1 and pp == 1:
        node = space.machine.ranks_per_node // tp
        stages += [(3, 0), *[(3, node)] * (1 < node < data and data % node == 0)]
    gathers = space.fixed.get("parallel.gather", GATHER) != GATHER
    return [(zero, sharded) for zero, sharded in stages if zero == 3 or not gathers]


def _experts(space: SearchSpace, model: StepModel, ranks: int, tp: int) -> list[tuple[int, int]]:
    """Return degrees of ep with those of etp: experts are whole, or divided as the dense layers are."""
    if model.experts is None:
        return [(space.fixed.get("parallel.ep", 1), space.fixed.get("parallel.etp", 1))]
    eps = tuple(ep for ep in _divisors(model.experts.count) if ranks % ep == 0 and ep <= 128)
    etps = (1, tp) if tp > 1 and model.experts.width % tp == 0 else (1,)
    return [
        (ep, etp)
        for ep in space.choices("parallel.ep", eps)
        for etp in space.choices("parallel.etp", etps)
        if etp == 1 or "parallel.etp" in space.fixed or ranks % (ep * etp) == 0
    ]


def _schedules(space: SearchSpace, model: StepModel, pp: int) -> list[tuple[str, int | None]]:
    """Return schedules with pipeline.chunks (None: as many as it has): nothing more complex than needed."""
    chunks = space.fixed.get("pipeline.chunks")
    names = catalog.PROPOSED
    if pp == 1:
        several = chunks and chunks > 1
        names = tuple(name for name in names if catalog.FAMILIES[name].placed != "plain")
        names = names if several else (catalog.SIMPLEST,)
    return [
        (name, number)
        for name in space.choices("pipeline.schedule", names)
        for number in ((2, 4) if name in catalog.LOOPED and not chunks else (chunks,))
        if pp * (number or 1) <= model.sizes.layers
    ]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, 4096) + 1) if number % divisor == 0]

"""`mpitrain plan`: the best layout for a model, a number of ranks and a machine, by predictions.

What the user gave stays as it is, also where it is the default; the rest is searched.
"""

import json
import math
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain import config as settings
from mpitrain.commands.output_file import require_file, write
from mpitrain.commands.plan.assumed import INTERVAL
from mpitrain.commands.plan.candidates import FixedKeys, SearchSpace, fixed_keys
from mpitrain.commands.plan.explained import (
    balance,
    binding,
    idle_degrees,
    parts_of,
    rules,
    why_lost,
)
from mpitrain.commands.plan.goodput import NODE_HOURS, Goodput, SaveTimes, goodput, save_times
from mpitrain.commands.plan.of_config import expert_load_of, model_of
from mpitrain.commands.plan.search import REFUSED, Candidate, SearchResult, searches
from mpitrain.commands.plan.timeline_file import write_timeline
from mpitrain.commands.waiting import Waiting
from mpitrain.config import Config, LoadedConfig
from mpitrain.data.tokenizer import tokenizer_of
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.inputs import as_argument, shown
from mpitrain.model.families.catalog import plan_of
from mpitrain.origins import PLANNER, SET, KeyOrigin
from mpitrain.plan.declared.formatting import finite
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory_limit import MemoryLimit, held_by_ranks, limit_of_rank
from mpitrain.plan.predict.process_memory import BEFORE_A_MODEL
from mpitrain.plan.predict.step_time.advice import advice
from mpitrain.plan.predict.step_time.expert_load import load_of_fullest
from mpitrain.plan.predict.step_time.machine import ON_CPU, MachineRates, rates_of
from mpitrain.plan.predict.step_time.predicted_timeline import predict_timeline
from mpitrain.plan.predict.step_time.resolved_layout import compute_of, recompute_of
from mpitrain.plan.predict.step_time.step import hfu, mfu
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.training.run_plan import beginning

SAVED = 0.05  # of a rank's memory: what recomputation must save to be worth a line
CHECKED = 6  # of the best that are planned as a run would be
TOKENS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# of what is chosen also with the value of its default, so that another default changes nothing
ALWAYS_WRITTEN = (
    "parallel.tp", "parallel.cp", "parallel.pp", "parallel.dp", "parallel.zero", "pipeline.schedule",
    "batch.global", "batch.micro", "memory.recompute",
)  # fmt: skip
NOT_IN_THE_TIMES = "what its copies to the host and back, and an update there, take is not in the times"
OFFLOADED = 'nothing fits without memory.offload = "optimizer"'


class PlanRequest(NamedTuple):
    """What was asked.

    machine, memory_gb: go before run.machine and memory.limit_gb; "" and 0: not given. tokens: of a
    training, as it was typed. node_ranks: that are on a node, 0 for the machine's. save_s: that a
    save stops training, 0: predicted.
    """

    config: str | None
    overrides: tuple[str, ...]
    ranks: int
    machine: str = ""
    memory_gb: float = 0.0
    top: int = 5
    explain: bool = False
    tokens: str = ""
    node_hours: float = NODE_HOURS
    out: str | None = None
    json: bool = False
    timeline: str | None = None
    node_ranks: int = 0
    save_s: float = 0.0

    def read(self) -> LoadedConfig:
        """Return the configuration with the model of model.init and the options. Raises ConfigError."""
        typed = {"run.machine": self.machine, "memory.limit_gb": self.memory_gb}
        given = settings.read(self.config, self.overrides)
        given = given.with_values({key: value for key, value in typed.items() if value}, KeyOrigin(SET))
        return beginning(given)[0]


class RunnableLayout(NamedTuple):
    """A layout that a run can have.

    held: bytes that its fullest rank holds by the run's own plan.
    """

    candidate: Candidate
    held: int

    @property
    def config(self) -> Config:
        return self.candidate.config


def make_plan(asked: PlanRequest) -> str:
    """Return the answer as text or JSON; write the best configuration. Raises as find_layouts() does."""
    answer = find_layouts(asked)
    if asked.json:
        return json.dumps(finite(answer.as_tree()), indent=1, allow_nan=False)
    return answer.as_text()


def find_layouts(asked: PlanRequest) -> "PlanAnswer":
    """Return the layouts that fit, and write the best configuration if that is asked for.

    Raises ConfigError if none fits.
    """
    if asked.out is not None:
        require_file("--out", asked.out)
    loaded = asked.read()
    given, origins = loaded
    limit = _limit(given, asked)
    rates = rates_of(given, asked.node_ranks)._replace(memory_bytes=limit.num_bytes)
    tokens = _tokens(asked.tokens)
    with Waiting("mpitrain plan"):
        model = model_of(given)
        _refuse_idle_degrees(given, model)
        space = _space(loaded, asked.ranks, rates)
        notes = _assumptions(given, space)
        if not origins.is_given("data.sequence"):
            notes.append(f"data.sequence is open: {given.data.sequence} tokens are assumed")
        if rates.doubt:
            notes.append(f"the figures of {rates.name} can't be trusted: {rates.doubt}; measure it again")
        found, chosen, refusal = _fitting(model, space, asked, limit)
        if not chosen and _may_offload(loaded, rates):
            offloaded, chosen, _ = _fitting(model, space.offloading(), asked, limit)
            found = offloaded if chosen else found
            notes += [OFFLOADED if rates.knows_offload else f"{OFFLOADED}: {NOT_IN_THE_TIMES}"] * bool(chosen)
    if not chosen:
        raise _nothing_fits(model, space, found, limit, refusal)
    if asked.out is not None:
        write("--out", asked.out, _written(loaded, chosen[0], tokens, asked.out).encode())
    if asked.timeline is not None:
        layout = chosen[0].candidate.layout
        write_timeline(asked.timeline, predict_timeline(model, layout, rates), layout.describe())
    return PlanAnswer(asked, model, rates, found, chosen, limit.usable, notes, tokens, space.fixed)


def _limit(given: Config, asked: PlanRequest) -> MemoryLimit:
    """Return what a rank may hold of memory.limit_gb, or of the machine that predicts."""
    named = settings.with_values(given, {"run.machine": given.run.machine or ON_CPU})
    found = limit_of_rank(named, asked.ranks, asked.node_ranks)
    assert found is not None  # a named machine has memory
    return found


def _written(given: LoadedConfig, best: RunnableLayout, tokens: float, out: str) -> str:
    """Return what the user gave and the planner chose, as TOML.

    Its run has a directory of its own, and with tokens the steps that these take.
    """
    before, chosen = settings.flatten(given.config), settings.flatten(best.config)
    keys = {key for key in chosen if key in ALWAYS_WRITTEN or chosen[key] != before[key]}
    values: dict[str, Any] = {}
    if tokens:
        values["run.steps"] = math.ceil(tokens / best.candidate.layout.tokens)
    if not given.origins.is_given("run.dir"):
        values["run.dir"] = _unused(f"runs/{Path(out).stem}")
    origins = given.origins.updated(keys, KeyOrigin(PLANNER))
    planned = LoadedConfig(best.config, origins).with_values(values, KeyOrigin(PLANNER))
    return settings.given_toml(planned)


def _unused(folder: str) -> str:
    """Return a name of a folder that isn't there: this one, or with a number after it."""
    names = (folder, *(f"{folder}-{number}" for number in range(2, 1000)))
    return next((name for name in names if not os.path.lexists(name)), folder)


def _fitting(
    model: StepModel, space: SearchSpace, asked: PlanRequest, limit: MemoryLimit
) -> tuple[SearchResult, list[RunnableLayout], str]:
    """Return the first search of which something fits, and that; of the first one where nothing does.

    With them comes what a run says of the first layout that it refuses.
    """
    unfit: set[StepLayout] = set()
    tried = []
    for found in searches(model, space, limit.of_tensors, unfit):
        chosen, refusal = _chosen(found, asked, space, limit, unfit)
        if chosen:
            return found, chosen, refusal
        tried.append((found, refusal))
    found, refusal = tried[0]
    return found, [], refusal


def _may_offload(given: LoadedConfig, rates: MachineRates) -> bool:
    """Return whether memory.offload is open, and of a GPU whose host has memory of its own."""
    is_open = given.config.memory.offload == "none" and not given.origins.is_given("memory.offload")
    return is_open and rates.on_gpu


def _nothing_fits(
    model: StepModel, space: SearchSpace, found: SearchResult, limit: MemoryLimit, refusal: str
) -> ConfigError:
    """Return the error of a search that left nothing. refusal: what a run's plan says of the first one."""
    why = binding(found.refused, found.tried, limit.usable, is_empty=True)
    if found.refused["memory"] and not limit.on_gpu:
        why += f" as a process, which takes {BEFORE_A_MODEL / 1e9:.2g} GB before it has a model"
    if not found.tried:
        idle = idle_degrees(model, space.ranks, space.fixed)
        why += f": {idle}" if idle else ""
    elif refusal:
        why += f" (of the first: {refusal})"
    elif found.refused.most_common(1)[0][0] == REFUSED:
        why += f" (of the first: {found.example})"
    return ConfigError(
        f"{model.name} on {space.ranks} ranks of {space.machine.name}: {why}; fixed: "
        f"{_named(space.fixed) or 'nothing'}; change what is fixed, --ranks, --memory or batch.global"
    )


def _named(fixed: FixedKeys) -> str:
    return ", ".join(f"{key} = {value}" for key, value in fixed.items())


def _space(given: LoadedConfig, ranks: int, rates: MachineRates) -> SearchSpace:
    """Return what is searched: the configuration, with a batch that is assumed where it is open."""
    config, origins = given
    batch = config.batch.global_ or _assumed_batch(config, ranks)
    tokenizer = tokenizer_of(config.data)
    return SearchSpace(
        settings.with_values(config, {"batch.global_": batch}), fixed_keys(config, origins), ranks, rates,
        tokenizer.vocab, tokenizer.needed, expert_load_of(config, batch),
    )  # fmt: skip


def _assumptions(given: Config, space: SearchSpace) -> list[str]:
    """Say what is assumed of a configuration, and where times are those of something else."""
    rates = space.machine
    notes = []
    if not given.batch.global_:
        batch = space.given.batch.global_
        notes.append(f"batch.global is open: {batch} sequences of {given.data.sequence} are assumed")
    compute = compute_of(given, rates)
    if compute != given.precision.compute:
        notes.append(
            f"precision.compute = {given.precision.compute}: no rate of {rates.name}, its time is that of "
            f"{compute}"
        )
    recompute = given.memory.recompute
    if recompute_of(recompute) != recompute:
        notes.append(f'memory.recompute = "{recompute}": its time is that of "{recompute_of(recompute)}"')
    if given.memory.offload != "none" and not rates.knows_offload:
        notes.append(f'memory.offload = "{given.memory.offload}": {NOT_IN_THE_TIMES}')
    return notes


def _assumed_batch(config: Config, ranks: int) -> int:
    """Return sequences of a step that all data ranks can divide: 32 and a sequence a rank at least."""
    parallel = config.parallel
    dp = parallel.dp or max(1, ranks // (parallel.tp * parallel.cp * max(1, parallel.pp)))
    each = dp * config.batch.micro
    return each * math.ceil(max(32, ranks) / each)


def _refuse_idle_degrees(config: Config, model: StepModel) -> None:
    """Raise ConfigError, as a run does, for experts' degrees of a model that has none."""
    for key, degree in (("ep", config.parallel.ep), ("etp", config.parallel.etp)):
        if model.experts is None and degree > 1:
            raise ConfigError(f"parallel.{key} = {degree}: {model.name} has no experts; leave it out")


def planned(config: Config, ranks: int, rates: MachineRates) -> Plan:
    """Return the plan of a layout that was found, as a run on a machine makes it."""
    tokenizer = tokenizer_of(config.data)
    return plan_of(SearchSpace(config, {}, ranks, rates, tokenizer.vocab, tokenizer.needed).resolved(config))


def _chosen(
    found: SearchResult,
    asked: PlanRequest,
    space: SearchSpace,
    limit: MemoryLimit,
    unfit: set[StepLayout],
) -> tuple[list[RunnableLayout], str]:
    """Return the best layouts that a run accepts and that fit, by the run's own plan.

    Further layouts are planned until some fit; those that don't are counted, and put into `unfit`.
    With them comes what a run says of the first that it refuses, if it refuses any.
    """
    chosen: list[RunnableLayout] = []
    refusal = ""
    for number, each in enumerate(found.ranked):
        if len(chosen) >= min(asked.top, CHECKED) or (number >= 2 * CHECKED and chosen):
            break
        try:
            held = _held(each, space, limit)
        except MpitrainError as error:
            found.refused[REFUSED] += 1
            refusal = refusal or error.args[0]
            continue
        if held > limit.usable:
            found.refused["memory"] += 1
            unfit.add(each.layout)
            continue
        if any(_saves_little(each, other, other.held - held, limit.usable) for other in chosen):
            found.refused["what is slower and saves little memory"] += 1
            continue
        chosen.append(RunnableLayout(each, held))
    return chosen, refusal


def _saves_little(each: Candidate, other: RunnableLayout, saved: int, limit: float) -> bool:
    """Return whether a layout is a faster one with more or less recomputation, for which no memory asks."""
    faster = other.candidate.layout
    alike = each.layout._replace(recompute=faster.recompute, regathers=faster.regathers) == faster
    return alike and saved < SAVED * limit


def _held(candidate: Candidate, space: SearchSpace, limit: MemoryLimit) -> int:
    """Return the bytes of the rank with most memory, by the plan that a run makes.

    Of many microbatches some are planned: a pipeline's peak comes before three rounds of it.
    """
    layout = candidate.layout
    few = min(layout.num_microbatches, 3 * layout.pp)
    config = settings.with_values(candidate.config, {"batch.global_": few * layout.dp * layout.micro})
    plan = plan_of(space.resolved(config))
    return limit.needed(held_by_ranks(plan, limit.on_gpu))


def _tokens(text: str) -> float:
    """Return a number of tokens. Raises ConfigError if it is none."""
    if not text:
        return 0.0
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([kmbt]?)", text.lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"--tokens {shown(text)}: needed a number of tokens, such as 300B or 15T")
    return float(match[1]) * TOKENS.get(match[2], 1.0)


class PlanAnswer(NamedTuple):
    """All that was found, to be shown."""

    asked: PlanRequest
    model: StepModel
    rates: MachineRates
    found: SearchResult
    chosen: list[RunnableLayout]
    limit: float
    notes: list[str]
    tokens: float
    fixed: FixedKeys

    def as_tree(self) -> dict[str, Any]:
        return {
            "machine": self.rates.name,
            "ranks": self.asked.ranks,
            "parameters": self.model.num_parameters,
            "active_parameters": self.model.num_active,
            "layouts_tried": self.found.tried,
            "left_out": dict(self.found.refused),
            "notes": self.notes,
            "best": [self._tree_of(each) for each in self.chosen],
            "advice": self._advice(),
            **({"training": self._training()._asdict()} if self.tokens else {}),
        }

    def _tree_of(self, each: RunnableLayout) -> dict[str, Any]:
        layout, step = each.candidate.layout, each.candidate.found
        return {
            "layout": {
                **layout._asdict(),
                "dp": layout.dp,
                "num_microbatches": layout.num_microbatches,
                "expert_load": load_of_fullest(layout, self.rates),
            },
            "seconds": step.seconds,
            "interval_s": [bound * step.seconds for bound in INTERVAL],
            "tokens_per_s": layout.tokens / step.seconds,
            "mfu": mfu(self.model, layout, self.rates, step.seconds),
            "hfu": hfu(self.model, layout, self.rates, step.seconds),
            "parts_s": parts_of(step),
            "held_bytes": each.held,
            "memory_limit_bytes": self.limit,
        }

    def _advice(self) -> list[str]:
        best = self.chosen[0]
        layout, found = best.candidate.layout, best.candidate.found
        return advice(self.model, layout, self.rates, found, held=best.held)

    def _save(self) -> SaveTimes:
        best = self.chosen[0]
        blocking = best.config.run.save == "blocking"
        return save_times(self.model, best.candidate.layout, self.rates, blocking, self.asked.save_s)

    def _training(self) -> Goodput:
        best = self.chosen[0].candidate
        hours = self.asked.node_hours
        return goodput(best.layout, self.rates, best.found.seconds, self.tokens, hours, self._save())

    def as_text(self) -> str:
        best = self.chosen[0].candidate
        lines = [
            f"{self.model.name}: {self.model.num_parameters / 1e9:.4g} billion parameters, "
            f"{self.model.num_active / 1e9:.4g} active; {self.asked.ranks} ranks of "
            f"{self.rates.name}, {self.limit / 1e9:.3g} GB each; {best.layout.batch} x "
            f"{best.layout.sequence} tokens a step",
            *self.notes,
            binding(self.found.refused, self.found.tried, self.limit, is_empty=False),
            "",
            f"      s/step  {INTERVAL[0]}-{INTERVAL[1]} x it   MFU   HFU  GB/rank  layout",
            *(self._line(number, each) for number, each in enumerate(self.chosen, start=1)),
            "",
            self._parts(best),
            *self._load(best.layout),
            *(
                f"{number}. {why_lost(best, each.candidate)}"
                for number, each in enumerate(self.chosen[1:], start=2)
            ),
            *self._rules(best),
            *(f"advice: {line}" for line in self._advice()),
        ]
        if self.asked.explain:
            lines += ["", *balance(self.model, best.layout, self.rates)]
        if self.tokens:
            lines += ["", self._text_of_training()]
        if self.asked.out is not None:
            command = f"mpirun -n {self.asked.ranks} mpitrain run {as_argument(self.asked.out)}"
            lines += ["", f"written to {shown(self.asked.out)}: {command}"]
        if self.asked.timeline is not None:
            lines += ["", f"the first one's step is written to {shown(self.asked.timeline)}"]
        return "\n".join(lines)

    def _line(self, number: int, each: RunnableLayout) -> str:
        layout, step = each.candidate.layout, each.candidate.found
        low, high = (bound * step.seconds for bound in INTERVAL)
        used = [100 * of(self.model, layout, self.rates, step.seconds) for of in (mfu, hfu)]
        held = each.held / 1e9
        full = "  nearly full" if each.held > 0.95 * self.limit else ""
        return (
            f"{number:>2}.{step.seconds:>9.3g}  {low:>5.3g}-{high:<6.3g}{used[0]:>7.1f} "
            f"{used[1]:>5.1f} {f'{held:.1f}' if held >= 1 else f'{held:.2g}':>7}   {layout.describe()}{full}"
        )

    def _rules(self, best: Candidate) -> list[str]:
        others = [each.candidate for each in self.chosen[1:]]
        found = rules(best, others, self.rates, self.fixed)
        return [
            *["rules that decided: " + "; ".join(found)] * bool(found),
            *["as given: " + _named(self.fixed)] * bool(self.fixed),
        ]

    def _parts(self, best: Candidate) -> str:
        parts = parts_of(best.found)
        words = ", ".join(
            f"{name} {100 * took / best.found.seconds:.1f} %" for name, took in parts.items() if took > 0
        )
        return f"the first one's step, slowest pipeline rank: {words} (axes: time waiting for their messages)"

    def _load(self, layout: StepLayout) -> list[str]:
        """Say with which load of experts the first one is predicted."""
        if layout.ep == 1 or (layout.expert_load is None and self.rates.on_gpu):  # theirs have it in them
            return []
        source = "an estimate" if layout.expert_load is None else layout.expert_load.source
        load = load_of_fullest(layout, self.rates)
        return [f"the most loaded ep rank gets {load:.3g} times the mean of tokens: {source}"]

    def _text_of_training(self) -> str:
        found = self._training()
        hours = "GPU-hours" if self.rates.on_gpu else "rank-hours"
        words = (
            f"{self.asked.tokens} tokens: {found.steps:,} steps, {_few_digits(found.days)} days, "
            f"{_few_digits(found.gpu_hours)} {hours} without failures; with one of a node each "
            f"{self.asked.node_hours:,.0f} h "
        )
        if not found.share:
            return words + "no time is left between failures and saves"
        every = found.save_every_s
        interval = f"{every / 60:,.0f} minutes" if every >= 120 else f"{every:.0f} s"
        return (
            f"{words}and {self._save().describe()} every {interval} "
            f"{100 * found.share:.1f} % of the time trains: {_few_digits(found.days / found.share)} days"
        )


def _few_digits(value: float) -> str:
    """Return a number as text: from 10 on with one digit behind the point, from 10,000 on with none."""
    if value < 10:
        return f"{value:.3g}"
    return f"{value:.1f}" if value < 1e4 else f"{value:,.0f}"

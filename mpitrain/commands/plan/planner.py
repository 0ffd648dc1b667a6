"""`mpitrain plan`: print and write the best layouts, which planner/choice.py finds."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mpitrain import config as settings
from mpitrain.cluster.progress_bar import ProgressBar
from mpitrain.commands.output_file import as_csv, require_file, write
from mpitrain.commands.plan.plan_variants import ScalingPoint, changes, layout_rows, scaling_text
from mpitrain.commands.plan.timeline_file import write_timeline
from mpitrain.commands.requests import PlanRequest
from mpitrain.config import LoadedConfig
from mpitrain.data.batch_sizes import amount_in
from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import as_argument, shown
from mpitrain.origins import FILE, PLANNER, SET, KeyOrigin
from mpitrain.plan.declared.formatting import as_json
from mpitrain.plan.predict.step_time.advice import advice
from mpitrain.plan.predict.step_time.expert_load import load_of_fullest
from mpitrain.plan.predict.step_time.predicted_timeline import predict_timeline
from mpitrain.plan.predict.step_time.step import hfu, mfu
from mpitrain.planner.candidates import KEYS_OF_AXIS
from mpitrain.planner.choice import PlannedLayouts, RunnableLayout, choose_layouts, few_digits, named
from mpitrain.planner.explained import balance, binding, rules, terms_of, why_lost
from mpitrain.planner.goodput import (
    NODE_HOURS,
    CopiesInMemory,
    Goodput,
    SaveTimes,
    copy_s,
    goodput,
    save_times,
    with_copies,
)
from mpitrain.planner.search import Candidate
from mpitrain.training.run_plan import beginning

TOP = 5  # layouts that are printed
# of what is chosen also with the value of its default, so that another default changes nothing
ALWAYS_WRITTEN = (
    "parallel.tp", "parallel.cp", "parallel.pp", "parallel.dp", "parallel.zero", "pipeline.schedule",
    "batch.global", "batch.micro", "memory.recompute",
)  # fmt: skip


def make_plan(asked: PlanRequest, ranks: int) -> str:
    """Return the answer as text or JSON; write the best configuration. Raises as find_layouts() does."""
    answer = find_layouts(asked, ranks)
    if asked.json:
        return as_json(answer.as_tree())
    if not asked.what_if:
        return answer.as_text()
    return "\n".join([answer.as_text(), "", _against_unchanged(asked, answer)])


def _against_unchanged(asked: PlanRequest, answer: "PlanAnswer") -> str:
    names = ", ".join(each.describe() for each in changes(asked.what_if))
    try:
        unchanged = replace(asked, what_if=(), out=None, all=None, timeline=None)
        before = find_layouts(unchanged, answer.ranks).chosen[0]
    except ConfigError as error:
        return f"what if {names}: something fits. Without, {error.args[0]}"
    old, new = before.expected(answer.rates), answer.best
    times = old.found.seconds / new.found.seconds
    same = "the same layout" if old.layout == new.layout else f"instead of {old.layout.describe()}"
    return (
        f"what if {names}: {new.found.seconds:.3g} s a step, not {old.found.seconds:.3g}, "
        f"{times:.2f} times as fast; {same}"
    )


def scaling(asked: PlanRequest, counts: Sequence[int]) -> str:
    """Return the best layout of each number of ranks, as lines or JSON. Raises ConfigError."""
    points = []
    for count in counts:
        try:
            answer = find_layouts(replace(asked, top=1), count)
        except ConfigError as error:
            points.append(ScalingPoint(count, None, why=error.args[0]))
            continue
        layout, step, _ = answer.best
        low, high = answer.between(answer.chosen[0])
        used = mfu(answer.model, layout, answer.rates, step.seconds)
        points.append(ScalingPoint(count, layout, step.seconds, (low, high), used))
    if not asked.json:
        return scaling_text(points)
    tree = [
        {**each._asdict(), "layout": each.layout and each.layout._asdict(), "tokens_per_s": each.tokens_per_s}
        for each in points
    ]
    return as_json({"scaling": tree})


def find_layouts(asked: PlanRequest, ranks: int, node_ranks: int = 0) -> "PlanAnswer":
    """Return the layouts that fit, and write the best configuration if that is asked for.

    node_ranks: of a node; 0: the machine's. Raises ConfigError if none fits.
    """
    changed = changes(asked.what_if)
    loaded = _read(asked)
    _require_files(asked, loaded)
    tokens = _tokens(asked.tokens)
    with ProgressBar("mpitrain plan"):
        planned = choose_layouts(loaded, ranks, asked.top or TOP, node_ranks, changed)
    answer = PlanAnswer(**vars(planned), asked=asked, tokens=tokens)
    best = answer.chosen[0]
    if asked.all is not None:
        write("--all", asked.all, _all_layouts(answer, Path(asked.all).suffix))
    if asked.out is not None:
        write("--out", asked.out, _written(loaded, best, tokens, asked.out).encode())
    if asked.timeline is not None:
        layout = best.candidate.layout
        timeline = predict_timeline(answer.model, layout, answer.rates.in_median())
        write_timeline(asked.timeline, timeline, layout.describe())
    return answer


def _require_files(asked: PlanRequest, given: LoadedConfig) -> None:
    """Raise ConfigError for a file that can't be written, or that a configuration is read from."""
    values = settings.flatten(given.config)
    read = [asked.config, *(origin.where for origin in given.origins.by_key.values() if origin.kind == FILE)]
    read += [values[key] for key in settings.PATHS if isinstance(values[key], str)]
    if asked.out is not None:
        require_file("--out", asked.out, (".toml",), read)
    if asked.all is not None:
        require_file("--all", asked.all, (".csv", ".svg", ".png"), [*read, asked.timeline])


def _read(asked: PlanRequest) -> LoadedConfig:
    """Return the configuration with the model of model.init and the options. Raises ConfigError."""
    typed = {"run.machine": asked.machine, "memory.limit_gb": asked.memory_gb}
    given = settings.read(asked.config, asked.overrides)
    given = given.with_values({key: value for key, value in typed.items() if value}, KeyOrigin(SET))
    return beginning(given)[0]


def _all_layouts(answer: "PlanAnswer", suffix: str) -> bytes:
    middle = answer.rates.spread.middle
    if suffix == ".csv":
        chosen = [each.candidate.layout for each in answer.chosen]
        return as_csv(layout_rows(answer.found, chosen, middle))
    from mpitrain.commands.plan.sweep_picture import time_against_memory  # matplotlib

    bounded = answer.found.bounded()
    layouts = [(float(each.held), middle * seconds) for each, seconds in bounded if seconds is not None]
    return time_against_memory(layouts, answer.limit, suffix[1:])


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
        folder = f"runs/{Path(out).stem}"
        names = (folder, *(f"{folder}-{number}" for number in range(2, 1000)))
        values["run.dir"] = next((name for name in names if not os.path.lexists(name)), folder)
    origins = given.origins.updated(keys, KeyOrigin(PLANNER))
    planned = LoadedConfig(best.config, origins).with_values(values, KeyOrigin(PLANNER))
    return settings.given_toml(planned)


def _tokens(text: str | None) -> float:
    """Return a number of tokens. Raises ConfigError if it is none."""
    if not text:
        return 0.0
    tokens = amount_in(text)
    if not tokens or tokens < 1:
        raise ConfigError(f"--tokens {shown(text)}: needed a number of tokens, such as 300B or 15T")
    return float(tokens)


@dataclass(frozen=True)
class PlanAnswer(PlannedLayouts):
    """All that was found, to be shown."""

    asked: PlanRequest
    tokens: float

    @cached_property
    def best(self) -> Candidate:
        """The first layout, with the seconds that the machine's steps take in the median."""
        return self.chosen[0].expected(self.rates)

    def as_tree(self) -> dict[str, Any]:
        return {
            "machine": self.rates.name,
            "ranks": self.ranks,
            "parameters": self.model.num_parameters,
            "active_parameters": self.model.num_active,
            "flops_per_token": self.model.flops_per_token(self.best.layout.sequence),
            "layouts_tried": self.found.tried,
            "left_out": dict(self.found.refused),
            "notes": self.notes,
            "best": [self._tree_of(each) for each in self.chosen],
            "advice": self._advice(),
            **({"training": self._tree_of_training()} if self.tokens else {}),
        }

    def _tree_of(self, each: RunnableLayout) -> dict[str, Any]:
        layout, step, _ = each.expected(self.rates)
        between = self.between(each)
        return {
            "layout": {
                **layout._asdict(),
                "dp": layout.dp,
                "num_microbatches": layout.num_microbatches,
                "expert_load": load_of_fullest(layout, self.rates),
            },
            "seconds": step.seconds,
            "interval_s": between,
            "tokens_per_s": layout.tokens / step.seconds,
            "mfu": mfu(self.model, layout, self.rates, step.seconds),
            "mfu_interval": [mfu(self.model, layout, self.rates, bound) for bound in reversed(between)],
            "hfu": hfu(self.model, layout, self.rates, step.seconds),
            "parts_s": terms_of(step),
            "held_bytes": each.held,
            "memory_limit_bytes": self.limit,
        }

    def between(self, each: RunnableLayout) -> list[float]:
        """Return between which seconds four steps of five are expected."""
        spread = self.rates.spread
        return [bound * each.candidate.found.seconds for bound in (spread.low, spread.high)]

    def _advice(self) -> list[str]:
        best, held = self.chosen[0].candidate, self.chosen[0].held
        searched = [axis for axis, keys in KEYS_OF_AXIS.items() if not any(key in self.fixed for key in keys)]
        return advice(self.model, best.layout, self.rates, best.found, held=held, searched=searched)

    @property
    def _hours(self) -> float:
        return self.asked.node_hours or NODE_HOURS

    @cached_property
    def _save(self) -> SaveTimes:
        blocking = self.best.config.run.save == "blocking"
        return save_times(self.model, self.best.layout, self.rates, blocking, self.asked.save_s or 0.0)

    @cached_property
    def _training(self) -> Goodput:
        layout, step, _ = self.best
        return goodput(layout, self.rates, step.seconds, self.tokens, self._hours, self._save)

    @cached_property
    def _copies(self) -> CopiesInMemory | None:
        """What recovery.every adds on several nodes; None on one, which has no partner."""
        layout, step, _ = self.best
        if layout.ranks <= self.rates.ranks_per_node:
            return None
        copying_s = copy_s(self.model, layout, self.rates)
        return with_copies(self._training, layout, self.rates, step.seconds, self._hours, copying_s)

    def _tree_of_training(self) -> dict[str, Any]:
        return {**self._training._asdict(), "copies": self._copies and self._copies._asdict()}

    def as_text(self) -> str:
        best = self.best
        lines = [
            f"{self.model.name}: {_short(self.model.num_parameters, 4)} parameters, "
            f"{_short(self.model.num_active, 4)} active; {counted(self.ranks, 'ranks')} of "
            f"{self.rates.name}, {self.limit / 1e9:.3g} GB each; {best.layout.batch} x "
            f"{best.layout.sequence} tokens a step",
            *self.notes,
            binding(self.found.refused, self.found.tried, self.limit, is_empty=False),
            "",
            "      s/step    p10-p90    MFU %  p10-p90 HFU % GB/rank   layout",
            *(self._line(number, each) for number, each in enumerate(self.chosen, start=1)),
            "",
            self._terms(),
            *self._load(),
            *(f"{number}. {self._why_lost(each)}" for number, each in enumerate(self.chosen[1:], start=2)),
            *self._rules(),
            *(f"advice: {line}" for line in self._advice()),
        ]
        if self.asked.explain:
            lines += ["", *balance(self.model, best.layout, self.rates)]
        if self.tokens:
            lines += ["", self._text_of_training()]
        if self.asked.out is not None:
            command = f"mpirun -n {self.ranks} mpitrain run {as_argument(self.asked.out)}"
            lines += ["", f"written to {shown(self.asked.out)}: {command}"]
        if self.asked.all is not None:
            lines += ["", f"all {self.found.tried} layouts are written to {shown(self.asked.all)}"]
        if self.asked.timeline is not None:
            lines += ["", f"the step of layout 1 is written to {shown(self.asked.timeline)}"]
        return "\n".join(lines)

    def _why_lost(self, each: RunnableLayout) -> str:
        first, its = (of.preference(self.rates, self.limit) for of in (self.chosen[0], each))
        return why_lost(self.best, each.expected(self.rates), its.drawback(first))

    def _line(self, number: int, each: RunnableLayout) -> str:
        layout, step, _ = each.expected(self.rates)
        low, high = self.between(each)
        used = [100 * of(self.model, layout, self.rates, step.seconds) for of in (mfu, hfu)]
        least, most = (100 * mfu(self.model, layout, self.rates, bound) for bound in (high, low))
        held = each.held / 1e9
        memory = f"{held:.1f}" if held >= 1 else f"{held:.2g}"
        full = "  nearly full" if each.preference(self.rates, self.limit).is_nearly_full else ""
        return (
            f"{number:>2}.{step.seconds:>9.3g}  {low:>5.3g}-{high:<6.3g}{used[0]:>6.1f}  "
            f"{least:>3.0f}-{most:<3.0f}{used[1]:>6.1f} {memory:>7}   {layout.describe()}{full}"
        )

    def _rules(self) -> list[str]:
        best, *others = (each.candidate for each in self.chosen)
        found = rules(best, others, self.rates, self.fixed)
        return [
            *["rules that decided: " + "; ".join(found)] * bool(found),
            *["as given: " + named(self.fixed)] * bool(self.fixed),
        ]

    def _terms(self) -> str:
        best = self.best
        terms = terms_of(best.found)
        words = ", ".join(
            f"{name} {100 * took / best.found.seconds:.1f} %" for name, took in terms.items() if took > 0
        )
        daily = 86400 * best.layout.tokens / best.found.seconds
        return (
            f"step of layout 1, slowest pipeline rank: {words} "
            f"(axes: time waiting for their messages); {_short(daily)} tokens a day"
        )

    def _load(self) -> list[str]:
        """Say with which load of experts layout 1 is predicted."""
        layout = self.best.layout
        if layout.ep == 1 or (layout.expert_load is None and self.rates.on_gpu):  # theirs have it in them
            return []
        source = "an estimate" if layout.expert_load is None else layout.expert_load.source
        load = load_of_fullest(layout, self.rates)
        return [f"the most loaded ep rank gets {load:.3g} times the mean of tokens: {source}"]

    def _text_of_training(self) -> str:
        found = self._training
        hours = "GPU-hours" if self.rates.on_gpu else "rank-hours"
        spread = self.rates.spread
        bounds = spread.low / spread.middle, spread.high / spread.middle

        def within(value: float) -> str:
            low, high = (few_digits(bound * value) for bound in bounds)
            return f"{few_digits(value)} ({low} to {high})"

        words = (
            f"{self.asked.tokens} token{'s' * (self.asked.tokens != '1')}: "
            f"{counted(found.steps, 'steps', ',')}, "
            f"{within(found.days)} days, {within(found.gpu_hours)} {hours} without failures"
        )
        if price := self.asked.price:
            words += f", {within(price * found.gpu_hours)} at {price:g} per {hours[:-1]}"
        words += f"; with a failure of each node in {self._hours:,.0f} h "
        if not found.share:
            return words + "no time is left between failures and saves"
        words += (
            f"and {self._save.describe()} every {found.save_every_s / 60:,.0f} minutes, "
            f"{100 * found.share:.1f} % of the time is training: {within(found.days / found.share)} days"
        )
        copies = self._copies
        if not copies or copies.share <= found.share:
            return words
        return (
            f"{words}\nrecovery.every = {copies.every} and a spare node (mpitrain job slurm --spare 1): "
            f"{100 * copies.share:.1f} % of the time is training: {within(found.days / copies.share)} days"
        )


def _short(number: float, digits: int = 3) -> str:
    """Return a number of few digits with the word of its size."""
    for size, word in ((1e12, " trillion"), (1e9, " billion"), (1e6, " million")):
        if number >= size:
            return f"{number / size:.{digits}g}{word}"
    return f"{number:,.0f}"

"""What was predicted of a run and what it measured, side by side: a few lines at its end.

Predicted are the time of a step and its terms, as by `mpitrain plan`, from the figures of a machine
(run.machine); what rank 0 sends, as by `mpitrain program --traffic`; its memory, as by `mpitrain
memory`.

    waiting    of the rank that waited least, which the slowest pipeline rank is. Of pp it is predicted
               as the bubble of the schedule
    computing  what is left of the step: the update, too
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.inputs import shown
from mpitrain.plan.declared.formatting import aligned, megabytes
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.step_time.machine import (
    MachineFile,
    MachineRates,
    as_fast_as,
    find_machine,
    known,
    like_gpu,
    machine_of,
)
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.stage_seconds import stages_of
from mpitrain.plan.predict.step_time.step import predict_step
from mpitrain.plan.predict.step_time.step_model import StepModel, step_model
from mpitrain.planner.measured_run import MeasuredRun

MOST_REHEARSED = 2_000  # instructions of a rank: a second or two
# of a run that is done: a family, a layer or a schedule of the user's own may be beyond the formulas
NO_PREDICTION = (
    MpitrainError,
    ArithmeticError,
    LookupError,
    AttributeError,
    TypeError,
    ValueError,
    RuntimeError,
)
TERMS = ("computing", "pp", "tp", "cp", "ep", "dp")
TERM_OF_AXIS = {  # of each axis that a run counts, see plan/axes.py
    **dict.fromkeys(("links", "model"), "pp"),
    **dict.fromkeys(("tp", "kv"), "tp"),
    "cp": "cp",
    **dict.fromkeys(("experts", "experts_near", "experts_far", "tokens"), "ep"),
}  # of others: dp, gradients and weights


class StepTerms(NamedTuple):
    """Seconds of a step by term; predicted has none where formulas don't have the run. source: by what.

    stages: predicted seconds of a microbatch by kind of instruction, of each stage.
    """

    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    source: str
    stages: Sequence[Mapping[str, float]]


def step_terms(run: MeasuredRun) -> StepTerms | None:
    """Return a step as predicted and as measured; None of a run of one step."""
    if not run.num_steps or not run.counted:
        return None
    measured = measured_terms(run)
    try:
        machine, source = machine_of_run(run)
        rates = machine_of(machine)
        middle = rates.spread.middle  # of steps of such a machine, as `mpitrain plan` prints them
        predicted = {term: middle * took for term, took in predicted_terms(run, rates).items()}
        stages = [
            {kind: middle * took for kind, took in stage.by_kind().items()}
            for stage in stages_of(*_modelled(run, rates))
        ]
    except NO_PREDICTION as error:
        return StepTerms({}, measured, f"no step is predicted: {_reason(error)}", ())
    return StepTerms(predicted, measured, f"predicted by the figures of {source}", stages)


def compare(run: MeasuredRun, terms_of_step: StepTerms | None) -> str:
    """Return the table of what step_terms() has."""
    if terms_of_step is None:
        return ""
    predicted, measured, source, _ = terms_of_step
    predicted_sent, unknown = _sent(run)
    terms = [name for name in TERMS if name in measured or name in predicted]
    sent = run.usages[0]
    rows = [
        ("step, ms", "all", *terms, "MB sent", "MB held"),
        ("predicted", *_times(predicted, terms), predicted_sent, megabytes(run.predicted_bytes)),
        (
            "measured",
            *_times(measured, terms),
            megabytes(sum(usage.num_bytes for usage in sent.values()) / run.counted),
            "-" if run.held_bytes is None else megabytes(run.held_bytes),
        ),
    ]
    return "\n".join([*aligned(rows).splitlines(), f"  {source}{_difference(predicted, measured)}", *unknown])


def _times(terms: Mapping[str, float], names: list[str]) -> list[str]:
    """Return milliseconds; "-" of a step that isn't predicted."""
    if not terms:
        return ["-"] * (len(names) + 1)
    return [f"{1e3 * took:,.1f}" for took in (sum(terms.values()), *(terms.get(name, 0.0) for name in names))]


def measured_terms(run: MeasuredRun) -> dict[str, float]:
    """Return the seconds of a step by what the rank that waited least spent them on."""
    least = min(run.usages, key=lambda usages: sum(usage.blocked_s for usage in usages.values()))
    terms: dict[str, float] = {}
    for axis, usage in least.items():
        term = TERM_OF_AXIS.get(axis, "dp")
        terms[term] = terms.get(term, 0.0) + usage.blocked_s / run.counted
    return {"computing": max(0.0, run.step_s - sum(terms.values())), **terms}


def predicted_terms(run: MeasuredRun, rates: MachineRates) -> dict[str, float]:
    """Return the seconds of a step and of its terms as a machine's figures predict them.

    Raises one of NO_PREDICTION where formulas don't have the run.
    """
    found = predict_step(*_modelled(run, rates))
    waiting = {"pp": found.bubble, **found.exposed}
    waiting["ep"] += waiting.pop("etp")
    computing = found.seconds - sum(waiting.values())
    return {"computing": computing, **{name: took for name, took in waiting.items() if took > 0}}


def _modelled(run: MeasuredRun, rates: MachineRates) -> tuple[StepModel, StepLayout, MachineRates]:
    config = run.plan.config
    rates = rates.with_ranks_per_node(config.comm.node_ranks or run.node_ranks)
    return step_model(run.plan), layout_of(config, rates, run.plan.routing), rates


def machine_of_run(run: MeasuredRun) -> tuple[MachineFile, str]:
    """Return the figures of run.machine, else of the one whose data are nearest; and its name.

    Of a CPU that nobody has measured only the peak is known, which the run's MFU is a share of.
    Raises ConfigError if there is none, or if its file is gone meanwhile.
    """
    asked = run.plan.config.run.machine
    if asked:
        found = find_machine(asked)
        return found, found.name
    if not run.gpu:
        laptop = as_fast_as(known()["laptop"], run.peak)
        return laptop, f'profile "laptop", scaled to this rank\'s peak ({run.peak / 1e9:,.0f} GFLOP/s)'
    near = like_gpu(run.gpu)
    if near is None:
        raise ConfigError(f"found no machine of jobs/machines/ like {shown(run.gpu)}; set run.machine")
    return near, near.name


def _reason(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, MpitrainError) else repr(error)


def _sent(run: MeasuredRun) -> tuple[str, list[str]]:
    """Return the megabytes that rank 0 sends in a step, as layers and program declare them, or why not."""
    count = len(run.plan.training.ranks[0])
    if count > MOST_REHEARSED:
        return "-", [f"  too many instructions ({count:,}) to predict traffic"]
    from mpitrain.actor.rehearsal import Rehearsal

    try:
        return megabytes(sum(Rehearsal(_on_its_nodes(run), 0).sent().values())), []
    except NO_PREDICTION as error:
        return "-", [f"  no bytes are predicted: {_reason(error)}"]


def _on_its_nodes(run: MeasuredRun) -> Plan:
    """Return the plan with the run's nodes, which a plan of one node doesn't name."""
    config = run.plan.config
    if config.comm.node_ranks or run.node_ranks >= run.plan.axes.grid.size:
        return run.plan
    return run.plan.with_values({"comm.node_ranks": run.node_ranks})


def _difference(predicted: Mapping[str, float], measured: Mapping[str, float]) -> str:
    if not predicted:
        return ""
    more = {name: measured.get(name, 0.0) - predicted.get(name, 0.0) for name in {*predicted, *measured}}
    term = max(more, key=lambda name: abs(more[name]))
    took = sum(measured.values()) / sum(predicted.values())
    what = "computing" if term == "computing" else f"waiting for {term}"
    return f"; measured / predicted {took:.2f}, largest difference: {what} {1e3 * more[term]:+,.1f} ms"

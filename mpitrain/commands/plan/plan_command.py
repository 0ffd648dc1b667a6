"""`mpitrain plan` and its back-test: read what was typed, refuse what does nothing."""

from dataclasses import replace

from mpitrain.commands.declared_options import options_given, refuse_options
from mpitrain.commands.output_file import require_file
from mpitrain.commands.plan.backtest import backtest
from mpitrain.commands.plan.plan_variants import counts_of
from mpitrain.commands.plan.planner import make_plan, scaling
from mpitrain.commands.plan.timeline_file import KINDS
from mpitrain.commands.requests import PlanRequest
from mpitrain.errors import ConfigError, nearest
from mpitrain.inputs import is_there, shown
from mpitrain.plan.declared.family import presets

BACKTEST = "backtest"
OF_BACKTEST = {"--out", "--json", "--machine"}
OF_ONE_NUMBER = ("--out", "--timeline", "--all", "--explain", "--tokens", "--what-if", "--top")
SEVERAL = "does nothing with several numbers of ranks; give one, or leave it out"


def answer(request: PlanRequest) -> str:
    """Return what the command prints."""
    if request.config == BACKTEST:
        return _backtest(request)
    _refuse_idle(request)
    if request.ranks is None:
        raise ConfigError("--ranks is missing; give the number of ranks, such as --ranks 64")
    counts = counts_of(request.ranks)
    request = _with_preset(request)
    if len(counts) == 1:
        return make_plan(request, counts[0])
    refuse_options(request, OF_ONE_NUMBER, SEVERAL)
    return scaling(request, counts)


def _refuse_idle(request: PlanRequest) -> None:
    if request.rows is not None:
        raise ConfigError(f"found {shown(request.rows)} after CONFIG; needed one file, or backtest before it")
    if request.timeline is not None:
        require_file("--timeline", request.timeline, KINDS)
    if request.json:
        refuse_options(request, ("--explain",), "does nothing with --json; leave one of them out")
    if request.tokens is None:
        without = "does nothing without --tokens; add --tokens, or leave it out"
        refuse_options(request, ("--node-hours", "--save-s", "--price"), without)


def _with_preset(request: PlanRequest) -> PlanRequest:
    """Return the request, whose CONFIG may be a preset's name."""
    preset = request.config
    if preset is None or is_there(preset):
        return request
    if preset not in presets():
        if near := nearest(preset.rpartition("/")[2].lower(), presets()):
            raise ConfigError(f"{shown(preset)}: found no such file or preset; did you mean {near}?")
        return request
    return replace(request, config=None, overrides=(f"model.preset={preset}", *request.overrides))


def require_measurable(request: PlanRequest) -> PlanRequest:
    """Return the request of --measure with its model. Raises ConfigError, before ranks meet."""
    if request.config == BACKTEST or request.json:
        raise ConfigError(
            f"--measure does nothing with {'--json' if request.json else BACKTEST}; leave it out"
        )
    _refuse_idle(request)
    if request.ranks is not None and len(counts_of(request.ranks)) > 1:
        raise ConfigError(f"--measure {SEVERAL}")
    return _with_preset(request)


def _backtest(request: PlanRequest) -> str:
    others = options_given(request).keys() - OF_BACKTEST
    refuse_options(request, others, "does nothing with backtest; leave it out")
    if request.rows is None:
        raise ConfigError("backtest: needed a CSV, such as benchmarks/published_layouts.csv")
    return backtest(request.rows, request.json, request.out, request.machine or "")

"""`mpitrain plan` and its back-test: read what was typed, refuse what does nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.commands.plan.backtest import backtest
from mpitrain.commands.plan.plan_variants import changes, counts_of
from mpitrain.commands.plan.planner import PlanRequest, make_plan, scaling
from mpitrain.commands.plan.timeline_file import require_timeline
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown
from mpitrain.plan.declared.family import presets

if TYPE_CHECKING:
    from mpitrain.cluster.guard import Guard

BACKTEST = "backtest"
OF_BACKTEST = ("out", "json", "machine")


def answer(
    config: str | None,
    rows: str | None,
    overrides: tuple[str, ...],
    asked: dict[str, Any],
) -> str:
    """Return what the command prints. asked: its options as they were typed."""
    given = {name: value for name, value in asked.items() if value not in (None, False, ())}
    if config == BACKTEST:
        return _backtest(rows, overrides, given)
    _refuse_idle(rows, given)
    if "ranks" not in given:
        raise ConfigError("--ranks is missing; give the number of ranks, such as --ranks 64")
    counts = counts_of(given["ranks"])
    request = _request(config, overrides, {**given, "ranks": counts[0]})
    if len(counts) == 1:
        return make_plan(request)
    for name in ("out", "timeline", "all", "explain", "tokens", "what_if"):
        if name in given:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{option} does nothing with several numbers of ranks; give one, or leave it out"
            )
    return scaling(request, counts)


def _refuse_idle(rows: str | None, given: dict[str, Any]) -> None:
    if rows is not None:
        raise ConfigError(f"found {shown(rows)} after CONFIG; needed one file, or backtest before it")
    if "timeline" in given:
        require_timeline(given["timeline"])
    for name in ("node_hours", "save_s", "price"):
        if name in given and "tokens" not in given:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} does nothing without --tokens; add it, or leave it out")


def _request(config: str | None, overrides: tuple[str, ...], given: dict[str, Any]) -> PlanRequest:
    config, overrides = _preset(config, overrides)
    values = {"ranks": 0, "memory_gb": given.get("memory", 0.0), **given}
    fields = {name: value for name, value in values.items() if name in PlanRequest._fields}
    return PlanRequest(config, overrides, **fields, changed=changes(given.get("what_if", ())))


def _preset(config: str | None, overrides: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Return the file and the overrides; a preset's name stands for model.preset."""
    if config is None or Path(config).exists() or config not in presets():
        return config, overrides
    return None, (f"model.preset={config}", *overrides)


def measure(
    config: str | None,
    rows: str | None,
    overrides: tuple[str, ...],
    asked: dict[str, Any],
    guard: "Guard",
    say: Callable[[str], None],
) -> int:
    """Plan, and measure the first layouts. Collective over all ranks; returns the exit code."""
    given = {name: value for name, value in asked.items() if value not in (None, False, ())}
    if config == BACKTEST or "json" in given:
        raise ConfigError(
            f"--measure does nothing with {'--json' if 'json' in given else BACKTEST}; leave it out"
        )
    _refuse_idle(rows, given)
    from mpitrain.commands.plan.measured_steps import measure as measured  # torch

    counts = counts_of(given.get("ranks", "1"))
    if len(counts) > 1:
        raise ConfigError("--measure does nothing with several numbers of ranks; give one, or leave it out")
    given = {**given, **({"ranks": counts[0]} if "ranks" in given else {})}
    return measured(_request(config, overrides, given), given["measure"], guard, say)


def _backtest(rows: str | None, overrides: tuple[str, ...], given: dict[str, Any]) -> str:
    idle = [f"--{name.replace('_', '-')}" for name in given if name not in OF_BACKTEST]
    idle += ["--set"] * bool(overrides)
    if idle:
        raise ConfigError(f"{idle[0]} does nothing with backtest; leave it out")
    if rows is None:
        raise ConfigError("backtest: needed a CSV, such as benchmarks/published_layouts.csv")
    return backtest(rows, given.get("json", False), given.get("out"), given.get("machine", ""))

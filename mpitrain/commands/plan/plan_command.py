"""`mpitrain plan` and its back-test: read what was typed, refuse what does nothing."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpitrain.commands.plan.backtest import backtest
from mpitrain.commands.plan.goodput import NODE_HOURS
from mpitrain.commands.plan.planner import PlanRequest, make_plan
from mpitrain.commands.plan.timeline_file import require_timeline
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown

if TYPE_CHECKING:
    from mpitrain.cluster.guard import Guard

BACKTEST = "backtest"
OF_BACKTEST = ("out", "json")


def answer(
    config: str | None,
    rows: str | None,
    overrides: tuple[str, ...],
    asked: dict[str, Any],
) -> str:
    """Return what the command prints. asked: its options as they were typed."""
    given = {name: value for name, value in asked.items() if value not in (None, False)}
    if config == BACKTEST:
        return _backtest(rows, overrides, given)
    _refuse_idle(rows, given)
    if "ranks" not in given:
        raise ConfigError("--ranks is missing; give the number of ranks, such as --ranks 64")
    return make_plan(_request(config, overrides, given))


def _refuse_idle(rows: str | None, given: dict[str, Any]) -> None:
    if rows is not None:
        raise ConfigError(f"found {shown(rows)} after CONFIG; needed one file, or backtest before it")
    if "timeline" in given:
        require_timeline(given["timeline"])
    for name in ("node_hours", "save_s"):
        if name in given and "tokens" not in given:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} does nothing without --tokens; add it, or leave it out")


def _request(config: str | None, overrides: tuple[str, ...], given: dict[str, Any]) -> PlanRequest:
    return PlanRequest(
        config,
        overrides,
        given.get("ranks", 0),
        given.get("machine", ""),
        memory_gb=given.get("memory", 0.0),
        top=given.get("top", 5),
        explain=given.get("explain", False),
        tokens=given.get("tokens", ""),
        node_hours=given.get("node_hours", NODE_HOURS),
        save_s=given.get("save_s", 0.0),
        out=given.get("out"),
        json=given.get("json", False),
        timeline=given.get("timeline"),
    )


def measure(
    config: str | None,
    rows: str | None,
    overrides: tuple[str, ...],
    asked: dict[str, Any],
    guard: "Guard",
    say: Callable[[str], None],
) -> int:
    """Plan, and measure the first layouts. Collective over all ranks; returns the exit code."""
    given = {name: value for name, value in asked.items() if value not in (None, False)}
    if config == BACKTEST or "json" in given:
        raise ConfigError(
            f"--measure does nothing with {'--json' if 'json' in given else BACKTEST}; leave it out"
        )
    _refuse_idle(rows, given)
    from mpitrain.commands.plan.measured_steps import measure as measured  # torch

    return measured(_request(config, overrides, given), given["measure"], guard, say)


def _backtest(rows: str | None, overrides: tuple[str, ...], given: dict[str, Any]) -> str:
    idle = [f"--{name.replace('_', '-')}" for name in given if name not in OF_BACKTEST]
    idle += ["--set"] * bool(overrides)
    if idle:
        raise ConfigError(f"{idle[0]} does nothing with backtest; leave it out")
    if rows is None:
        raise ConfigError("backtest: needed a CSV, such as benchmarks/published_layouts.csv")
    return backtest(rows, given.get("json", False), given.get("out"))

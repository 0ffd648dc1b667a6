"""Layouts of `mpitrain sweep`, the machine that predicts them, and files to be written.

A layout is words as after --set, `parallel.pp=2 pipeline.schedule=zbv`; a file has one a line.
"""

import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpitrain import config as settings
from mpitrain.comm.base.world import World
from mpitrain.commands.output_file import as_csv, require_file, write
from mpitrain.commands.requests import SweepRequest
from mpitrain.config import Config, LoadedConfig
from mpitrain.data.tokenizer import tokenizer_of
from mpitrain.errors import DONE, ConfigError
from mpitrain.inputs import os_errors_as, read_text, shown
from mpitrain.model.families.catalog import plan_for
from mpitrain.plan.declared.formatting import as_json
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory_limit import require_limit
from mpitrain.plan.predict.node_memory import require_memory
from mpitrain.plan.predict.step_time.machine import ON_CPU, MachineRates, rates_of
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.step import Prediction, predict_step
from mpitrain.plan.predict.step_time.step_model import step_model
from mpitrain.plan.settings.job_ranks import JobRanks
from mpitrain.training.run_plan import beginning

MOST_BYTES = 1 << 18  # of a file of layouts
MOST_LAYOUTS = 1_000


class ScaledStep(NamedTuple):
    """A step on the first `ranks` ranks.

    typed: the layout as it was typed. layout: what it is there. batch: sequences. Times are seconds
    of a step.
    """

    typed: str
    ranks: int
    layout: str
    batch: int
    measured_s: float
    predicted_s: float
    tokens_per_s: float
    predicted_tokens_per_s: float
    efficiency: float
    predicted_efficiency: float
    waiting_s: float
    predicted_waiting_s: float


def require_files(asked: SweepRequest) -> None:
    """Raise ConfigError for a file that can't be written, before anything is measured."""
    if asked.out is not None:
        require_file("--out", asked.out, (), (asked.config, asked.file, asked.machine, asked.svg))
    if asked.svg is not None:
        require_file("--svg", asked.svg, (".svg",), (asked.config, asked.file))


def machine_name(asked: SweepRequest) -> str:
    """Return the machine that predicts the steps of a layout that names none."""
    return asked.machine or config_of(asked).config.run.machine or ON_CPU


def rates_for(asked: SweepRequest, config: Config, node_ranks: int) -> MachineRates:
    """Return the figures that predict a layout's steps, with so many ranks on a node.

    comm.node_ranks overrides these. Raises ConfigError.
    """
    name = asked.machine or config.run.machine or ON_CPU
    return rates_of(settings.with_values(config, {"run.machine": name}), node_ranks)


def read_layouts(asked: SweepRequest) -> list[str]:
    """Return all layouts, proved to be words. Raises ConfigError if there are too many."""
    layouts = [each.strip() for each in asked.layouts]
    if asked.file is not None:
        layouts += _lines_of(asked.file)
    if len(layouts) > MOST_LAYOUTS:
        raise ConfigError(f"found {len(layouts):,} layouts, needed at most {MOST_LAYOUTS:,}")
    for layout in layouts:
        config_of(asked, layout)  # what is misspelt is no row
    return layouts


def config_of(asked: SweepRequest, layout: str = "") -> LoadedConfig:
    """Return the configuration with a layout in it: what that leaves open is the default."""
    return settings.read(asked.config, (*asked.overrides, *words_of(layout)))


def _lines_of(path: str) -> list[str]:
    with os_errors_as(ConfigError, f"--layouts {shown(path)}", "give a text file"):
        text = read_text(path, MOST_BYTES)
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def words_of(layout: str) -> list[str]:
    """Return a layout as overrides. Raises ConfigError for a quote without its end."""
    try:
        return shlex.split(layout)
    except ValueError as error:
        raise ConfigError(f"layout {shown(layout)}: {error}; quote as in a shell") from None


def plan_on(given: LoadedConfig, ranks: JobRanks, batch: int = 0) -> Plan:
    """Return the plan of a run. batch: its sequences; 0: as the configuration says.

    Raises InputError for what can't run.
    """
    config = beginning(given)[0].config
    if batch:
        config = settings.with_values(config, {"batch.global_": batch})
    tokenizer = tokenizer_of(config.data)
    plan = plan_for(config, ranks, tokenizer)
    require_limit(plan, config, lambda other: plan_for(other, ranks, tokenizer), ranks.node_ranks)
    require_memory(plan)
    plan.training  # noqa: B018  # proved here, where trouble is still an InputError of all ranks
    return plan


def predicted_step(plan: Plan, rates: MachineRates) -> Prediction:
    """Return the step that a machine's take in the median, as `mpitrain plan` prints it."""
    found = predict_step(step_model(plan), layout_of(plan.config, rates, plan.routing), rates)
    return found.times(rates.spread.middle)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def conclude(
    asked: SweepRequest,
    rows: Sequence[Any],
    world: World,
    say: Callable[[str], None],
    text: Callable[[Sequence[Any], SweepRequest, World], str],
    draw: Callable[[Sequence[Any], SweepRequest, World], bytes],
) -> int:
    """Print rows as text or JSON, write CSV and picture; return 0. Collective; ConfigError."""

    def write_files() -> None:
        if asked.out is not None:
            write("--out", asked.out, as_csv([row._asdict() for row in rows]))
        if asked.svg is not None:
            write("--svg", asked.svg, draw(rows, asked, world))

    if world.rank == 0:
        scaling = {"scaling": asked.scaling} if asked.scaling else {}
        tree = {"ranks": world.size, **scaling, "machine": machine_name(asked), "steps": asked.steps}
        tree["rows" if asked.scaling else "layouts"] = [row._asdict() for row in rows]
        say(as_json(tree) if asked.json else text(rows, asked, world))
    world.on_first_rank("writing files", write_files)
    return DONE

"""`mpitrain schedule`: play a schedule, print it, draw it, compare it with others or with a run.

Neither MPI nor torch.
"""

import math
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from mpitrain.cluster.progress_bar import ProgressBar
from mpitrain.commands.declared_options import options_given, refuse_options
from mpitrain.commands.output_file import require_file, write
from mpitrain.commands.requests import ScheduleRequest
from mpitrain.commands.schedule.request import Request, play
from mpitrain.commands.schedule.text import as_json, as_text
from mpitrain.errors import ConfigError
from mpitrain.inputs import os_errors_as, read_text, shown
from mpitrain.plan.declared.screen import columns
from mpitrain.schedules import catalog
from mpitrain.schedules.auto_choice import AUTO
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.formats.csv_table import write_csv
from mpitrain.schedules.formats.other_formats import FORMS, write_as
from mpitrain.schedules.limits import MOST_TRACE_BYTES, require_searchable
from mpitrain.schedules.options import UNIT_TIMES, Options, StageTimes, Times
from mpitrain.schedules.play.measured import MeasuredTrace, read_trace
from mpitrain.schedules.table import Table, write_table

KINDS_OF_FILES = (".svg", ".png", ".txt")
KINDS_OF_TABLES = (".txt", ".csv")
WIDTH = 110  # of the grid where the screen's is not known
WIDTHS = 20, 1_000  # of a screen that can be drawn on
OF_A_TRACE = {"--trace", "--out", "--json"}  # compare with these alone shows one run
SLOWEST = 1e15  # of --times; the fastest is 1 of it, so that sums of both stay numbers


def answer(asked: ScheduleRequest) -> str:
    """Return what the command prints. Raises InputError."""
    if asked.form is not None and asked.table is None:
        raise ConfigError(f"--format {asked.form}: it is the form of a table; name its file by --table")
    typed = options_given(asked)
    if asked.trace is not None and asked.name == "compare" and not typed.keys() - OF_A_TRACE:
        _require_files(asked)
        with ProgressBar(f"mpitrain schedule compare --trace {shown(asked.trace)}"):
            return show_trace(asked, measured(asked.trace))
    request = Request(asked.name, asked.stages, asked.microbatches, _options(asked))
    if asked.trace is not None:
        if asked.times is not None:
            raise ConfigError("--trace and --times both say how long stages take; leave one out")
        request = timed(request, measured(asked.trace))
    if asked.name in ALL:
        refuse_options(asked, ALL[asked.name], f"does nothing with {asked.name}; {NAME_ONE}")
        if request.num_ranks is None or request.num_microbatches is None:
            raise ConfigError(f"{asked.name}: needs --stages and --microbatches, or the --trace of a run")
    if family := catalog.FAMILIES.get(asked.name):
        _refuse_idle(asked, family)
    _require_files(asked)
    with ProgressBar(f"mpitrain schedule {shown(asked.name)}") as notify:
        request = request._replace(options=request.options._replace(notify=notify))
        return SHOWS.get(asked.name, show)(request, asked)


def _require_files(asked: ScheduleRequest) -> None:
    """Raise ConfigError for a file that can't be written, or is the user's own table."""
    if asked.out is not None:
        require_file("--out", asked.out, KINDS_OF_FILES, (asked.name, asked.trace, asked.table))
    if asked.table is not None:
        require_file("--table", asked.table, KINDS_OF_TABLES, (asked.name, asked.trace))


def _draw(asked: ScheduleRequest, text: Callable[[], str], picture: str, *what: object) -> None:
    """Write --out, if it is asked for: a text, or what a function of this folder draws."""
    if asked.out is None:
        return
    kind = Path(asked.out).suffix[1:]
    if kind == "txt":
        write("--out", asked.out, (text() + "\n").encode())
    else:
        module, _, function = picture.partition(".")
        drawing = import_module(f"mpitrain.commands.schedule.{module}")  # matplotlib
        write("--out", asked.out, getattr(drawing, function)(*what, kind))


def _as_file(table: Table, path: str, form: str | None) -> str:
    """Return --table's content. Raises ScheduleError for what its form can't say."""
    if form in FORMS:
        return write_as(form, table)
    return write_csv(table) if Path(path).suffix == ".csv" else write_table(table)


def _refuse_idle(asked: ScheduleRequest, family: ScheduleFamily) -> None:
    """Raise ConfigError for recomputation or offloading with a schedule that plans neither."""
    for option in ("recompute", "offload"):
        if option not in family.takes:
            takes = [name for name, other in catalog.FAMILIES.items() if option in other.takes]
            instead = f"use {', '.join([AUTO, *takes])}, or leave it out"
            refuse_options(asked, [f"--{option}"], f"does nothing with {asked.name}; {instead}")


def show(request: Request, asked: ScheduleRequest) -> str:
    """Return one schedule's numbers, as text or as JSON; draw it, and write its table."""
    played = play(request)
    if asked.table:
        write("--table", asked.table, _as_file(played.table, asked.table, asked.form).encode())
    _draw(asked, lambda: as_text(played, WIDTH, whole=True), "picture.draw", played)
    return as_json(played) if asked.json else as_text(played, _screen())


def show_trace(asked: ScheduleRequest, trace: MeasuredTrace) -> str:
    """Return what a run measured beside what its times predict, as text or as JSON; draw it into --out."""
    from mpitrain.commands.schedule.measured_text import as_json, as_text
    from mpitrain.schedules.play.measurement import Measurement

    measurement = Measurement(trace)
    _draw(asked, lambda: as_text(measurement, WIDTH), "picture.draw_measured", measurement)
    return as_json(measurement) if asked.json else as_text(measurement, _screen())


def measured(trace: str) -> MeasuredTrace:
    """Read --trace: a run's trace.json, or the directory of the run."""
    path = os.path.join(trace, "trace.json") if os.path.isdir(trace) else trace
    if path != trace and not os.path.lexists(path):
        raise ConfigError(
            f"--trace {shown(trace)}: there is no {shown(path)}; a run with --set run.trace=3 records one"
        )
    with os_errors_as(ConfigError, f"--trace {shown(trace)}: can't be read"):
        return read_trace(read_text(path, MOST_TRACE_BYTES), shown(path))


def timed(request: Request, trace: MeasuredTrace) -> Request:
    """Plan with a run's times, for its size if no other is given. Blocks are divided evenly over stages."""
    from mpitrain.schedules.play.stage_work import measured_stages, share_of_rank, stage_work

    work, timeline = stage_work(trace), trace.timelines[0]
    total = sum(trace.works) or len(measured_stages(trace))
    num_ranks = request.num_ranks or len(timeline.programs)
    indices = {action.index for row in timeline.programs for action in row if action.kind == "F"}

    def stage_times(rank_of: tuple[int, ...]) -> tuple[StageTimes, ...]:
        return work.stage_times([total / len(rank_of)] * len(rank_of), rank_of)

    return request._replace(
        num_ranks=num_ranks,
        num_microbatches=request.num_microbatches or len(indices) // trace.segments * trace.copies,
        options=request.options._replace(
            times=share_of_rank(stage_times(tuple(range(num_ranks))), num_ranks, work.message)
        ),
        stage_times_of=stage_times,
        error=work.error,
    )


def show_frontier(request: Request, asked: ScheduleRequest) -> str:
    """Return time against memory of all schedules, as text or as JSON; draw it."""
    from mpitrain.commands.schedule import frontier_text as report
    from mpitrain.schedules.time_and_memory import StepSize, frontier

    assert request.num_ranks is not None and request.num_microbatches is not None
    size = StepSize(request.num_ranks, request.num_microbatches, request.options, request.stage_times_of)
    require_searchable("frontier", size.num_ranks, size.num_microbatches)
    found = frontier(size)
    text = report.as_text(found, size)
    _draw(asked, lambda: text, "picture.draw_frontier", found, size)
    return report.as_json(found) if asked.json else text


def show_all(request: Request, asked: ScheduleRequest) -> str:
    """Return all schedules of the catalogue at one size, as a table or as JSON."""
    from mpitrain.commands.schedule import comparison

    result = comparison.compare(request)
    return comparison.as_json(result) if asked.json else comparison.as_text(result)


SHOWS = {"compare": show_all, "frontier": show_frontier}
# what shows all schedules, and the options that are of one alone
NAME_ONE = "name one schedule"
ALL = {"compare": ("--out", "--table"), "frontier": ("--memory-limit", "--group", "--segments", "--table")}


def _screen() -> int:
    least, most = WIDTHS
    return min(max(columns() or WIDTH, least), most)


# ---------------------------------------------------------------- options


def _options(asked: ScheduleRequest) -> Options:
    times = None if asked.times is None else read_times(asked.times)
    return Options(
        asked.chunks, asked.group, asked.segments, times, memory_limit=asked.memory_limit,
        weight_memory=asked.weight_memory, recompute=asked.recompute, offload=asked.offload,
    )  # fmt: skip


def read_times(text: str) -> Times:
    """Read --times F,I,W,C. Whole numbers stay whole, so that their sums are exact."""
    words = text.split(",")
    if len(words) != len(UNIT_TIMES):
        raise ConfigError(
            f"--times {shown(text)}: found {len(words)} numbers, needed 4: of a rank's whole share of layers "
            "and one microbatch the time of the forward, of the backward for inputs, of the "
            "backward for weights, and of a message, for example --times 1,1,1,0"
        )
    return Times(*(_time(word.strip(), position == 3, text) for position, word in enumerate(words)))


def _time(word: str, may_be_0: bool, text: str) -> float:
    try:
        value = int(word) if word.lstrip("+-").isdecimal() else float(word)
    except ValueError:
        raise ConfigError(f"--times {shown(text)}: found '{shown(word)}', needed a number") from None
    needed = "0 or more" if may_be_0 else "more than 0"
    if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_0):
        raise ConfigError(f"--times {shown(text)}: found {shown(word)}, needed {needed}")
    if value and not 1 / SLOWEST <= value <= SLOWEST:
        raise ConfigError(
            f"--times {shown(text)}: found {shown(word)}, needed {1 / SLOWEST:g} to {SLOWEST:g}; "
            "choose another unit"
        )
    return value

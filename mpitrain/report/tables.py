"""Tables of a page, as HTML by the key of their section. All texts of a run are quoted."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from mpitrain.errors import DONE, FAILED, STOPPED_EARLY, counted
from mpitrain.report.curves import COLOURS, label_of
from mpitrain.report.recorded_run import RecordedRun, RunEnd
from mpitrain.report.run_ends import by_class, reliability
from mpitrain.report.series import median_of

# of ends.jsonl
CLASSES = {DONE: "done", FAILED: "failed", 2: "bad input", STOPPED_EARLY: "stopped early, with a checkpoint"}
FEWEST_CODES = 3  # exit codes of mpitrain up to this are no signals
SHOWN_KEYS = 400
MOST_RANKS = 1024  # of a drawn layout
MOST_WAITS = 8
MOST_SAMPLES = 20


class RunTable(NamedTuple):
    """A table of all runs, whose first column names the run. head: the others. rows: of one run."""

    section: str
    head: tuple[str, ...]
    rows: Callable[[RecordedRun], Iterable[Sequence[object]]]
    title: str = ""


def tables(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Return the tables that have rows."""
    content = defaultdict[str, str](str)
    for section, head, rows_of, title in TABLES:
        rows = [(label_of(number), *row) for number, run in enumerate(runs) for row in rows_of(run)]
        made = table(("", *head), rows)
        content[section] += f"<h3>{title}</h3>" * bool(title and made) + made
    notes = ((label_of(number), note) for number, run in enumerate(runs) for note in run.notes)
    content["runs"] += "".join(f"<p>{escape(label)}: {_text(note)}</p>" for label, note in notes)
    content["layout"] = "".join(_layout(number, run) for number, run in enumerate(runs))
    content["configuration"] = _configuration(runs)
    return {section: made for section, made in content.items() if made}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table, whose cells are quoted; "" without rows."""
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="scroll"><table><tr>{names}</tr>{body}</table></div>' if body else ""


def _cell(cell: object) -> str:
    is_number = isinstance(cell, int | float)
    return f"<td class=n>{_number(cell)}</td>" if is_number else f"<td>{_text(cell)}</td>"


def _text(cell: object) -> str:
    text = str(cell)
    return escape(text if len(text) <= 300 else f"{text[:300]}...")


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "-"
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**15 else f"{value:,.5g}"


def _run(run: RecordedRun) -> Iterator[Sequence[object]]:
    last, median = run.steps.last, run.steps.median
    counts = [int(x) if math.isfinite(x) else x for x in map(last, ("step", "tokens", "skipped"))]
    rates = median("tokens_per_s"), 100 * median("mfu"), 100 * median("hfu")
    losses = last("loss"), last("val_loss")
    yield run.path, *counts[:2], *losses, *rates, run.steps.num_spikes, counts[2]


def _parts(run: RecordedRun) -> Iterator[Sequence[object]]:
    predicted, measured = run.summary.predicted_s, run.summary.measured_s
    for part in dict.fromkeys([*measured, *predicted]):
        yield part, *(1e3 * parts.get(part, math.nan) for parts in (predicted, measured))
    if measured or predicted:
        yield "step", *(1e3 * sum(parts.values()) for parts in (predicted, measured))
        columns = run.steps.columns
        at_peak_s = columns["mfu"] * columns["step_s"] if "mfu" in columns else np.empty(0)
        yield "its FLOPs at peak rate", *[1e3 * median_of(at_peak_s)] * 2  # MFU is a share of it


def _idle(run: RecordedRun) -> Iterator[Sequence[object]]:
    for reason, seconds in run.steps.idle.items():
        yield f"waits for {reason}", 1e3 * seconds / max(1, run.steps.num_sampled)


def _memory(run: RecordedRun) -> Iterator[Sequence[object]]:
    for part in run.summary.memory:
        yield part.part, part.predicted / 1e6, (part.measured or math.nan) / 1e6


def _communication(run: RecordedRun) -> Iterator[Sequence[object]]:
    count = run.steps.num_sampled
    for name, cost in run.steps.comm.items():
        waits = (1e3 * seconds / count for seconds in (cost.blocked_s, cost.overlapped_s))
        yield name, cost.bytes / 1e6 / count, *waits


def _communication_of_ranks(run: RecordedRun) -> Iterator[Sequence[object]]:
    for name, cost in run.summary.comm.items():
        waits = 1e3 * cost.blocked_s, 1e3 * cost.worst_s, cost.worst_rank, 1e3 * cost.overlapped_s
        yield name, cost.bytes / 1e6, *waits


def _stragglers(run: RecordedRun) -> Iterator[Sequence[object]]:
    for who, seconds in sorted(run.steps.waits.items(), key=lambda wait: -wait[1])[:MOST_WAITS]:
        if seconds:
            yield f"rank 0 waits for rank {who}", 1e3 * seconds / max(1, run.steps.num_sampled)
    for who, count in islice(run.summary.slow.items(), MOST_WAITS):
        yield f"reported slow: {who}", counted(count, "times")


def _reliability(run: RecordedRun) -> Iterator[Sequence[object]]:
    known = reliability(run.ends, run.steps.columns.get("step_s"), run.steps.last("time"))
    if known is not None:
        between = known.num_failures, known.hours_between_failures
        yield len(run.ends), *between, known.steps_lost, 100 * known.share_trained


def _classes(run: RecordedRun) -> Iterator[Sequence[object]]:
    """Yield the ends by class: how often, how far apart in hours of running, what they cost."""
    for name, of_class in by_class(run.ends, _class_of).items():
        yield name, *of_class


def _ends(run: RecordedRun) -> Iterator[Sequence[object]]:
    for end in run.ends:
        yield end.time, _class_of(end), end.step, "" if end.lost is None else end.lost, end.job


def _class_of(end: RunEnd) -> str:
    signal = end.code - 128 if end.code > 128 else end.code  # MPICH's mpiexec: the number itself
    known = f"killed by signal {signal}" if FEWEST_CODES < signal < 32 else f"exit code {end.code}"
    return CLASSES.get(end.code, known)


def _layout(number: int, run: RecordedRun) -> str:
    axes = run.summary.axes
    sizes = {name: max(1, axes.get(name, 1)) for name in ("tp", "cp", "dp", "pp")}  # the first varies fastest
    boxes: dict[str, list[str]] = {}
    for rank, node in enumerate(run.summary.nodes[:MOST_RANKS]):
        places, left = {}, rank
        for name, size in sizes.items():
            left, places[name] = divmod(left, size)
        where = " ".join(f"{name} {place}" for name, place in places.items() if sizes[name] > 1)
        colour = COLOURS[places["pp"] % len(COLOURS)]
        boxes.setdefault(node, []).append(f'<i style="border-color:{colour}" title="{where}">{rank}</i>')
    drawn = "".join(f"<div>{_text(node)}<br>{''.join(ranks)}</div>" for node, ranks in boxes.items())
    if not drawn:
        return ""
    shape = " x ".join(f"{name}({size})" for name, size in axes.items())
    said = f"{label_of(number)}: {_text(shape)}; a colour is a pipeline rank"
    return f"<p>{said}</p><div class=nodes>{drawn}</div>"


def _evaluations(run: RecordedRun) -> Iterator[Sequence[object]]:
    for result in run.evaluations:
        for kind in ("data", "tasks"):
            for name, numbers in _objects(result.get(kind)):
                yield result.get("step", ""), name, _numbers(numbers)


def _samples(run: RecordedRun) -> Iterator[Sequence[object]]:
    """Yield the model's answers to tasks, of the newest validation and then of evaluations."""
    for step, name, sample in islice(_sampled(run), MOST_SAMPLES):
        yield step, name, sample.get("prompt", ""), *_answer(sample)


def _sampled(run: RecordedRun) -> Iterator[tuple[object, str, dict[str, Any]]]:
    if run.steps.samples is not None:
        for name, samples in run.steps.samples.samples.items():
            yield from ((run.steps.samples.step, name, sample) for sample in samples)
    for result in reversed(run.evaluations):
        for name, numbers in _objects(result.get("tasks")):
            for sample in _list(numbers.get("samples")):
                if isinstance(sample, dict):
                    yield result.get("step", ""), name, sample


def _answer(sample: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return what the model answered, what was right, and the log-likelihoods that decided."""
    right, choices = sample.get("target", ""), _list(sample.get("choices"))
    sums = [_number(x) for x in _list(sample.get("log_likelihoods")) if isinstance(x, int | float)]
    if choices:
        pairs = ", ".join(f"{choice}: {total}" for choice, total in zip(choices, sums))
        return _choice(choices, sample.get("choice")), _choice(choices, right), pairs
    if "greedy" in sample:
        return "the right one" if sample["greedy"] else "another", str(right), ", ".join(sums)
    return str(sample.get("text", "")).strip() or "(empty)", " or ".join(map(str, _list(right))), ""


def _choice(choices: Sequence[object], number: object) -> str:
    is_one = type(number) is int and 0 <= number < len(choices)
    return str(choices[number]) if is_one else "none"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _objects(value: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    items = value.items() if isinstance(value, dict) else ()
    return ((name, numbers) for name, numbers in items if isinstance(numbers, dict))


def _numbers(numbers: dict[str, Any]) -> str:
    known = ((key, x) for key, x in numbers.items() if isinstance(x, int | float))
    return ", ".join(f"{key} {_number(x)}" for key, x in known if not key.endswith("_stderr"))


def _configuration(runs: Sequence[RecordedRun]) -> str:
    of_runs = [{key: (value, origin) for key, value, origin in run.keys} for run in runs]
    names = list(dict.fromkeys(key for keys in of_runs for key in keys))[:SHOWN_KEYS]
    head = ["key", *chain(*((label_of(number), "from") for number in range(len(runs))))]
    rows = [[key, *chain(*(keys.get(key, ("", "")) for keys in of_runs))] for key in names]
    if len(runs) > 1:
        title, chosen = "Keys that differ", [row for row in rows if len(set(row[1::2])) > 1]
    else:
        title = "Keys that were given or chosen"
        chosen = [row for row in rows if not row[2].startswith(("default", "derived", "family"))]
    short, whole = table(head, chosen), table(head, rows)
    return (f"<h3>{title}</h3>{short}" * bool(short)) + (
        f"<details><summary>All keys</summary>{whole}</details>" * bool(whole)
    )


TABLES = (
    RunTable(
        "runs",
        ("run", "steps", "tokens", "loss", "validation", "median tokens/s", "median MFU %", "median HFU %",
         "spikes", "skipped"),
        _run,
    ),
    RunTable("step", ("part", "predicted, ms", "measured, ms"), _parts),
    RunTable("step", ("idle time of rank 0, mean of the last steps", "ms"), _idle),
    RunTable("memory", ("part", "predicted, MB", "measured, MB"), _memory),
    RunTable(
        "communication", ("axis", "MB", "blocked, ms", "overlapped, ms"), _communication,
        "Rank 0, mean of the last steps",
    ),
    RunTable(
        "communication", ("axis", "MB", "blocked, ms", "longest, ms", "of rank", "overlapped, ms"),
        _communication_of_ranks, "All ranks, mean over the steps of the last start",
    ),
    RunTable("stragglers", ("who", "ms per step"), _stragglers),
    RunTable(
        "ends", ("ends", "failures", "mean hours between failures", "steps lost", "goodput, %"), _reliability
    ),
    RunTable("ends", ("ends by class", "count", "mean hours between", "steps lost"), _classes),
    RunTable("ends", ("time", "end", "saved step", "steps lost", "job"), _ends),
    RunTable("evaluation", ("step", "file", "numbers"), _evaluations),
    RunTable(
        "samples", ("step", "task", "question", "answer", "right answer", "log-likelihoods"), _samples
    ),
)  # fmt: skip

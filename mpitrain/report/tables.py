"""Tables of a page, as HTML by the key of their section. All texts of a run are quoted."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from itertools import chain, islice
from typing import Any

import numpy as np

from mpitrain.errors import DONE, FAILED, STOPPED_EARLY, counted
from mpitrain.report.curves import COLOURS, label_of
from mpitrain.report.recorded_run import RecordedRun, RunEnd
from mpitrain.report.run_ends import by_class, reliability
from mpitrain.report.series import AxisCost

# of ends.jsonl
CLASSES = {DONE: "done", FAILED: "failed", 2: "bad input", STOPPED_EARLY: "stopped early, with a checkpoint"}
FEWEST_CODES = 3  # exit codes of mpitrain up to this are no signals
SHOWN_KEYS = 400
MOST_RANKS = 1024  # of a drawn layout
MOST_WAITS = 8
MOST_SAMPLES = 20


def tables(runs: Sequence[RecordedRun]) -> dict[str, str]:
    """Return the tables that have rows."""
    content = {
        "runs": _runs(runs),
        "step": _steps(runs) + _idle(runs),
        "memory": _memory(runs),
        "communication": _communication(runs) + _communication_of_ranks(runs),
        "stragglers": _stragglers(runs),
        "ends": _reliability(runs) + _classes(runs) + _ends(runs),
        "layout": "".join(_layout(number, run) for number, run in enumerate(runs)),
        "evaluation": _evaluations(runs),
        "samples": _samples(runs),
        "configuration": _configuration(runs),
    }
    return {key: table for key, table in content.items() if table}


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table, whose cells are quoted; "" without rows."""
    lines = [
        "".join(
            f"<td class=n>{_number(cell)}</td>"
            if isinstance(cell, int | float)
            else f"<td>{_text(cell)}</td>"
            for cell in row
        )
        for row in rows
    ]
    if not lines:
        return ""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><tr>{names}</tr>{body}</table></div>'


def _text(cell: object) -> str:
    text = str(cell)
    return escape(text if len(text) <= 300 else f"{text[:300]}...")


def _number(value: float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "-"
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**15 else f"{value:,.5g}"


def _runs(runs: Sequence[RecordedRun]) -> str:
    head = (
        "", "run", "steps", "tokens", "loss", "validation", "median tokens/s", "median MFU %", "median HFU %",
        "spikes", "skipped",
    )  # fmt: skip
    notes = "".join(
        f"<p>{escape(label_of(n))}: {_text(note)}</p>" for n, run in enumerate(runs) for note in run.notes
    )
    return table(head, (_run(number, run) for number, run in enumerate(runs))) + notes


def _run(number: int, run: RecordedRun) -> tuple[object, ...]:
    last, median = run.steps.last, run.steps.median
    counts = [int(x) if math.isfinite(x) else x for x in map(last, ("step", "tokens", "skipped"))]
    return (
        label_of(number), run.path, *counts[:2], last("loss"), last("val_loss"), median("tokens_per_s"),
        100 * median("mfu"), 100 * median("hfu"), run.steps.num_spikes, counts[2],
    )  # fmt: skip


def _steps(runs: Sequence[RecordedRun]) -> str:
    """Return a step by its parts, predicted beside measured."""
    rows = []
    for number, run in enumerate(runs):
        known = run.summary
        parts = list(dict.fromkeys([*known.measured_s, *known.predicted_s]))
        rows += [
            (label_of(number), part, _ms(known.predicted_s.get(part)), _ms(known.measured_s.get(part)))
            for part in parts
        ]
        if parts:
            sums = [_ms(sum(part.values())) for part in (known.predicted_s, known.measured_s)]
            rows.append((label_of(number), "a step", *sums))
            rows.append((label_of(number), "its FLOPs at peak rate", *[_ms(_at_the_peak(run))] * 2))
    return table(("", "part", "predicted, ms", "measured, ms"), rows)


def _idle(runs: Sequence[RecordedRun]) -> str:
    rows = [
        (label_of(number), f"waits for {reason}", 1e3 * seconds / max(1, run.steps.num_sampled))
        for number, run in enumerate(runs)
        for reason, seconds in run.steps.idle.items()
    ]
    return table(("", "idle time of rank 0, mean of the last steps", "ms"), rows)


def _at_the_peak(run: RecordedRun) -> float | None:
    """Return the seconds that a step's FLOPs take at the peak that MFU is a share of."""
    columns = run.steps.columns
    seconds = columns["mfu"] * columns["step_s"] if "mfu" in columns else np.empty(0)
    seconds = seconds[np.isfinite(seconds)]
    return float(np.median(seconds)) if len(seconds) else None


def _ms(seconds: float | None) -> float:
    return math.nan if seconds is None else 1e3 * seconds


def _memory(runs: Sequence[RecordedRun]) -> str:
    rows = [
        (label_of(number), part.part, part.predicted / 1e6, (part.measured or math.nan) / 1e6)
        for number, run in enumerate(runs)
        for part in run.summary.memory
    ]
    return table(("", "part", "predicted, MB", "measured, MB"), rows)


def _communication(runs: Sequence[RecordedRun]) -> str:
    def row(number: int, name: str, cost: AxisCost, count: int) -> tuple[object, ...]:
        return (
            label_of(number), name, cost.bytes / 1e6 / count, 1e3 * cost.blocked_s / count,
            1e3 * cost.overlapped_s / count,
        )  # fmt: skip

    rows = [
        row(number, name, cost, run.steps.num_sampled)
        for number, run in enumerate(runs)
        for name, cost in run.steps.comm.items()
    ]
    shown = table(("", "axis", "MB", "blocked, ms", "hidden, ms"), rows)
    return f"<h3>Rank 0, a step of the last ones</h3>{shown}" if shown else ""


def _communication_of_ranks(runs: Sequence[RecordedRun]) -> str:
    rows = [
        (
            label_of(number), name, cost.bytes / 1e6, 1e3 * cost.blocked_s, 1e3 * cost.worst_s,
            cost.worst_rank, 1e3 * cost.overlapped_s,
        )
        for number, run in enumerate(runs)
        for name, cost in run.summary.comm.items()
    ]  # fmt: skip
    head = ("", "axis", "MB", "blocked, ms", "longest, ms", "of rank", "hidden, ms")
    shown = table(head, rows)
    return f"<h3>All ranks, a step in the mean of the last start</h3>{shown}" if shown else ""


def _stragglers(runs: Sequence[RecordedRun]) -> str:
    rows: list[tuple[object, ...]] = []
    for number, run in enumerate(runs):
        waits = sorted(run.steps.waits.items(), key=lambda wait: -wait[1])[:MOST_WAITS]
        count = max(1, run.steps.num_sampled)
        rows += [(label_of(number), f"rank 0 waits for rank {who}", 1e3 * s / count) for who, s in waits if s]
        slow = list(run.summary.slow.items())[:MOST_WAITS]
        rows += [(label_of(number), f"reported slow: {who}", counted(count, "times")) for who, count in slow]
    return table(("", "who", "ms a step"), rows)


def _reliability(runs: Sequence[RecordedRun]) -> str:
    rows = []
    for number, run in enumerate(runs):
        known = reliability(run.ends, run.steps.columns.get("step_s"), run.steps.last("time"))
        if known is not None:
            rows.append(
                (
                    label_of(number), len(run.ends), known.num_failures, known.hours_between_failures,
                    known.steps_lost, 100 * known.share_trained,
                )
            )  # fmt: skip
    head = ("", "ends", "failures", "mean hours between failures", "steps lost", "goodput, %")
    return table(head, rows)


def _classes(runs: Sequence[RecordedRun]) -> str:
    """Return the ends by class: how often, how far apart in hours of running, what they cost."""
    rows = [
        (label_of(number), name, of_class.count, of_class.hours_between, of_class.steps_lost)
        for number, run in enumerate(runs)
        for name, of_class in by_class(run.ends, _class_of).items()
    ]
    return table(("", "ends by class", "count", "mean hours between", "steps lost"), rows)


def _ends(runs: Sequence[RecordedRun]) -> str:
    rows = [
        (label_of(number), end.time, _class_of(end), end.step, _lost(end), end.job)
        for number, run in enumerate(runs)
        for end in run.ends
    ]
    return table(("", "time", "end", "saved step", "steps lost", "job"), rows)


def _class_of(end: RunEnd) -> str:
    signal = end.code - 128 if end.code > 128 else end.code  # MPICH's mpiexec: the number itself
    known = f"killed by signal {signal}" if FEWEST_CODES < signal < 32 else f"exit code {end.code}"
    return CLASSES.get(end.code, known)


def _lost(end: RunEnd) -> object:
    return "" if end.lost is None else end.lost


def _layout(number: int, run: RecordedRun) -> str:
    """Return the ranks of each node, with a colour for each pipeline rank."""
    axes, nodes = run.summary.axes, run.summary.nodes[:MOST_RANKS]
    sizes = [max(1, axes.get(name, 1)) for name in ("tp", "cp", "dp", "pp")]
    boxes: dict[str, list[str]] = {}
    for rank, node in enumerate(nodes):
        *places, stage = _coordinates(rank, sizes)
        names = zip(("tp", "cp", "dp", "pp"), (*places, stage), sizes)
        where = " ".join(f"{name} {place}" for name, place, size in names if size > 1)
        colour = COLOURS[stage % len(COLOURS)]
        boxes.setdefault(node, []).append(f'<i style="border-color:{colour}" title="{where}">{rank}</i>')
    drawn = "".join(f"<div>{_text(node)}<br>{''.join(ranks)}</div>" for node, ranks in boxes.items())
    if not drawn:
        return ""
    shape = " x ".join(f"{name}({size})" for name, size in axes.items())
    said = f"{label_of(number)}: {_text(shape)}; a colour is a pipeline rank"
    return f"<p>{said}</p><div class=nodes>{drawn}</div>"


def _coordinates(rank: int, sizes: Sequence[int]) -> list[int]:
    """Return where a rank is along axes, of which the first varies fastest."""
    places = []
    for size in sizes:
        places.append(rank % size)
        rank //= size
    return places


def _evaluations(runs: Sequence[RecordedRun]) -> str:
    rows = [
        (label_of(number), result.get("step", ""), name, _numbers(numbers))
        for number, run in enumerate(runs)
        for result in run.evaluations
        for kind in ("data", "tasks")
        for name, numbers in _objects(result.get(kind))
    ]
    return table(("", "step", "file", "numbers"), rows)


def _samples(runs: Sequence[RecordedRun]) -> str:
    """Return the model's answers to tasks, of the newest validation and then of evaluations."""
    rows = [
        (label_of(number), step, name, sample.get("prompt", ""), *_answer(sample))
        for number, run in enumerate(runs)
        for step, name, sample in islice(_sampled(run), MOST_SAMPLES)
    ]
    head = ("", "step", "task", "question", "answer", "right answer", "log-likelihoods")
    return table(head, rows)


def _sampled(run: RecordedRun) -> Iterator[tuple[object, str, dict[str, Any]]]:
    """Yield step, task and answer."""
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
    known = {
        key: x for key, x in numbers.items() if isinstance(x, int | float) and not key.endswith("_stderr")
    }
    return ", ".join(f"{key} {_number(x)}" for key, x in known.items())


def _configuration(runs: Sequence[RecordedRun]) -> str:
    """Return the keys that somebody gave, or of several runs those that differ, and all in a fold."""
    of_runs = [{key: (value, origin) for key, value, origin in run.keys} for run in runs]
    names = list(dict.fromkeys(key for keys in of_runs for key in keys))[:SHOWN_KEYS]
    head = ["key"]
    for number in range(len(runs)):
        head += [label_of(number), "from"]
    rows = [[key, *chain(*(keys.get(key, ("", "")) for keys in of_runs))] for key in names]
    title, is_chosen = ("Keys that were given or chosen", _is_given)
    if len(runs) > 1:
        title, is_chosen = ("Keys that differ", _differs)
    short = table(head, filter(is_chosen, rows))
    whole = table(head, rows)
    return (f"<h3>{title}</h3>{short}" if short else "") + (
        f"<details><summary>All keys</summary>{whole}</details>" if whole else ""
    )


def _differs(row: Sequence[str]) -> bool:
    return len(set(row[1::2])) > 1


def _is_given(row: Sequence[str]) -> bool:
    """Return whether a key's value is neither its default nor derived, nor of the model's family."""
    return not row[2].startswith(("default", "derived", "family"))

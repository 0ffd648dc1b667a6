"""One HTML file with the figures of some runs, their ends, evaluations and configuration.

It needs no network, and its policy refuses any: the library's script stands in it. All texts of a run
are quoted.
"""

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import chain
from typing import Any

import numpy as np
from bokeh.embed import components
from bokeh.resources import Resources

from mpitrain.errors import DONE, FAILED, STOPPED_EARLY
from mpitrain.report.figures import curves, label_of, timeline
from mpitrain.report.recorded_run import RecordedRun
from mpitrain.report.series import AxisCost

STYLE = """
:root{color-scheme:light dark;--line:#8884}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1240px;padding:0 16px;
 background:Canvas;color:CanvasText;overflow-wrap:anywhere}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid var(--line)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:12px}
.grid>div,.wide{min-width:0}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;min-width:40%}
th,td{text-align:left;padding:3px 12px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}
td,th{overflow-wrap:normal;min-width:1.5em}td{max-width:60ch}
td.n{white-space:nowrap;text-align:right;font-variant-numeric:tabular-nums}details{margin:.5rem 0}
@media print{.grid{display:block}details{display:none}}
"""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
# of ends.jsonl
CLASSES = {DONE: "done", FAILED: "failed", 2: "bad input", STOPPED_EARLY: "stopped early, with a checkpoint"}
SHOWN_KEYS = 400


def page(runs: Sequence[RecordedRun], over: str = "step") -> str:
    """Return the page."""
    figures = curves(runs, over)
    steps = {number: timeline(run.trace) for number, run in enumerate(runs) if run.trace}
    plots = [*figures, *steps.values()]
    script, boxes = components(plots) if plots else ("", ())
    library = Resources(mode="inline", components=["bokeh"], minified=True).render_js() if plots else ""
    names = ", ".join(run.path for run in runs)
    sections = [
        _section("Runs", _runs(runs)),
        _section("Curves", f'<div class="grid">{"".join(boxes[: len(figures)])}</div>' if figures else ""),
        *(
            _section(f"A step of run {label_of(number)}", f'<div class="wide">{box}</div>{_LEGEND}')
            for number, box in zip(steps, boxes[len(figures) :])
        ),
        _section("Communication of rank 0, a step", _communication(runs)),
        _section("Ends", _ends(runs)),
        _section("Evaluation", _evaluations(runs)),
        _section("Configuration", _configuration(runs)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(names[:200])}</title><style>{STYLE}</style>{library}</head><body>"
        f"<h1>A report by mpitrain</h1>{''.join(sections)}{script}</body></html>\n"
    )


_LEGEND = (
    "<p>Blue F, vermilion B, yellow I, purple W, light blue messages of the pipeline, green collectives, "
    "grey the rest. Scroll to zoom, drag to move, hover for an instruction.</p>"
)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


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
    head = ("", "run", "steps", "tokens", "loss", "validation", "median tokens/s", "median MFU %", "spikes")
    notes = "".join(
        f"<p>{escape(label_of(n))}: {_text(note)}</p>" for n, run in enumerate(runs) for note in run.notes
    )
    return table(head, (_run(number, run) for number, run in enumerate(runs))) + notes


def _run(number: int, run: RecordedRun) -> tuple[object, ...]:
    columns = run.steps.columns

    def last(name: str) -> float:
        there = columns[name][np.isfinite(columns[name])] if name in columns else ()
        return float(there[-1]) if len(there) else math.nan

    def median(name: str) -> float:
        there = columns[name][np.isfinite(columns[name])] if name in columns else ()
        return float(np.median(there)) if len(there) else math.nan

    counts = [int(x) if math.isfinite(x) else x for x in (last("step"), last("tokens"))]
    return (
        label_of(number), run.path, *counts, last("loss"), last("val_loss"),
        median("tokens_per_s"), 100 * median("mfu"), run.steps.num_spikes,
    )  # fmt: skip


def _communication(runs: Sequence[RecordedRun]) -> str:
    def row(number: int, name: str, cost: AxisCost, count: int) -> tuple[object, ...]:
        return (
            label_of(number), name, cost.bytes / 1e6 / count, 1e3 * cost.blocked_s / count,
            1e3 * cost.overlapped_s / count,
        )  # fmt: skip

    rows = [
        row(number, name, cost, run.steps.num_comm)
        for number, run in enumerate(runs)
        for name, cost in run.steps.comm.items()
    ]
    return table(("", "axis", "MB", "blocked, ms", "hidden, ms"), rows)


def _ends(runs: Sequence[RecordedRun]) -> str:
    rows = [
        (label_of(number), end.time, CLASSES.get(end.code, f"exit code {end.code}"), end.step, end.job)
        for number, run in enumerate(runs)
        for end in run.ends
    ]
    return table(("", "time", "end", "step", "job"), rows)


def _evaluations(runs: Sequence[RecordedRun]) -> str:
    rows = [
        (label_of(number), result.get("step", ""), name, _numbers(numbers))
        for number, run in enumerate(runs)
        for result in run.evaluations
        for kind in ("data", "tasks")
        for name, numbers in _objects(result.get(kind))
    ]
    return table(("", "step", "file", "numbers"), rows)


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

"""One HTML file with the figures of some runs and their tables.

It needs no network, and its policy refuses any: the library's script stands in it. All texts of a
run are quoted. A figure is drawn when it is scrolled to: a phone takes a second for some.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from bokeh.embed import json_item
from bokeh.resources import Resources

from mpitrain.report import figures
from mpitrain.report.curves import CURVES, evaluated, label_of, lines_of, load_cells
from mpitrain.report.recorded_run import RecordedRun
from mpitrain.report.tables import tables

MOST_TIMELINES = 4  # one of 50,000 instructions is 1 MB
STYLE = """
:root{color-scheme:light dark;--line:#8884}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:1240px;padding:0 16px;
 background:Canvas;color:CanvasText;overflow-wrap:anywhere}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid var(--line)}
h3{font-size:1rem}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:12px}
.figure{min-width:0}
.scroll{overflow-x:auto}.scroll+.scroll{margin-top:1rem}
table{border-collapse:collapse;font-size:.9rem;min-width:40%}
th,td{text-align:left;padding:3px 12px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}
td,th{overflow-wrap:normal;min-width:1.5em}td{max-width:60ch}
td.n{white-space:nowrap;text-align:right;font-variant-numeric:tabular-nums}details{margin:.5rem 0}
.nodes{display:flex;flex-wrap:wrap;gap:8px}.nodes>div{border:1px solid var(--line);padding:4px 6px}
.nodes i{display:inline-block;min-width:2em;margin:1px;padding:0 4px;text-align:center;
 font-style:normal;font-size:.8rem;border-bottom:4px solid}
@media print{.grid{display:block}details{display:none}.figure{break-inside:avoid}}
"""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
LIVE_POLICY = f"{POLICY}; connect-src 'self'"
DRAW = """
const sources = new Map(), drawn = new Set();
const give = (name, data) => {
  sources.set(name, data);
  for (const shown of Bokeh.documents) {
    const source = shown.get_model_by_name(name);
    if (source) source.data = data;
  }
};
const draw = async (box) => {
  if (drawn.has(box.id)) return;
  drawn.add(box.id);
  const item = JSON.parse(document.getElementById(box.id + "-item").textContent);
  const views = await Bokeh.embed.embed_item(item, box.id);
  for (const {model} of views) if (model.tags.length > 0) showDetails(model);
  for (const [name, data] of sources) if ("figure-" + name.split(" ")[0] === box.id) give(name, data);
};
const boxes = [...document.querySelectorAll(".figure")];
const seen = new IntersectionObserver((entries) => {
  for (const {isIntersecting, target} of entries) if (isIntersecting) {
    seen.unobserve(target);
    setTimeout(draw, 0, target);
  }
});
for (const box of boxes) seen.observe(box);
addEventListener("beforeprint", () => boxes.forEach(draw));
"""
FOLLOW = """
let version = document.body.dataset.version;
const live = document.getElementById("live");
const take = (state) => {
  if (state.shape !== document.body.dataset.shape) return location.reload();
  version = state.version;
  for (const [id, content] of Object.entries(state.tables)) {
    const place = document.getElementById(id);
    const open = place.querySelector("details[open]") !== null;
    place.innerHTML = content;
    const fold = place.querySelector("details");
    if (fold) fold.open = open;
  }
  for (const [name, data] of Object.entries(state.sources)) give(name, data);
};
const follow = async () => {
  try {
    const answer = await fetch("state", {headers: {"If-None-Match": version}, cache: "no-store"});
    if (answer.status === 200) take(await answer.json());
    live.textContent = "live, " + new Date().toLocaleTimeString();
  } catch { live.textContent = "mpitrain watch doesn't answer"; }
  setTimeout(follow, 1000);
};
setTimeout(follow, 1000);
"""
LEGEND = (
    "<p>Blue F, vermilion B, yellow I, purple W, light blue messages of the pipeline, green collectives, "
    "grey the rest; the black bar below a computation is how long it waited for messages of its axes, "
    "drawn at its end. Ctrl and the wheel zoom, drag to move, hover for an instruction; of very many zoom in "
    "first.</p>"
)


SECTIONS = {  # by the key of its table
    "runs": "Runs",
    "curves": "Curves",
    "step": "A step",
    "memory": "Memory of rank 0",
    "communication": "Communication",
    "stragglers": "Stragglers",
    "experts": "Experts",
    "ends": "Restarts and ends",
    "layout": "Layout over nodes",
    "evaluation": "Evaluation",
    "samples": "Answers to tasks",
    "configuration": "Configuration",
}


class PageFigure(NamedTuple):
    """A figure. section: of SECTIONS. title: above it."""

    section: str
    plot: Any
    title: str = ""


def page(runs: Sequence[RecordedRun], over: str = "step", version: str = "") -> str:
    """Return the page. version: of one that asks its server for what is new; "" for a file."""
    plots = _figures(runs, over)
    items = "".join(
        f'<script type="application/json" id="figure-{name}-item">{_json(json_item(placed.plot))}</script>'
        for name, placed in plots.items()
    )
    library = Resources(mode="inline", components=["bokeh"], minified=True).render_js() if plots else ""
    script = figures.details() + DRAW + FOLLOW * bool(version)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{LIVE_POLICY if version else POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(', '.join(run.path for run in runs)[:200])}</title><style>{STYLE}</style></head>"
        f'<body data-version="{version}" data-shape="{escape(_shape(runs))}">'
        f"<h1>{'A run, live' if version else 'A report by mpitrain'}</h1><p id=live></p>"
        f"{_sections(runs, plots)}{items}{library}<script>{script}</script></body></html>\n"
    )


def state(runs: Sequence[RecordedRun], over: str, version: str) -> str:
    """Return what has changed on a page, as its script takes it."""
    steps = [run.steps for run in runs]
    sources = {
        f"{curve.figure} {line.number}": {"x": line.x.tolist(), "y": line.y.tolist()}
        for curve, lines in lines_of((*CURVES, *evaluated(steps)), steps, over).items()
        for line in lines
    }
    for number, of_run in enumerate(steps):
        if of_run.loads is not None:
            cells = load_cells(of_run.loads)
            sources[f"loads-{label_of(number)} 0"] = {name: cell.tolist() for name, cell in cells.items()}
    return _json({"version": version, "shape": _shape(runs), "tables": tables(runs), "sources": sources})


def _shape(runs: Sequence[RecordedRun]) -> str:
    """Return what a page is made for: if it changes, the page is reloaded."""
    shapes = []
    for run in runs:
        known = [name for name, column in run.steps.columns.items() if np.isfinite(column).any()]
        shapes.append([known, len(run.trace), run.steps.loads is None, list(tables([run]))])
    return json.dumps(shapes)


def _figures(runs: Sequence[RecordedRun], over: str) -> dict[str, PageFigure]:
    titles = {curve.figure: curve.column for curve in evaluated([run.steps for run in runs])}
    placed = {
        name: PageFigure("evaluation" if name in titles else "curves", plot, titles.get(name, ""))
        for name, plot in figures.curves(runs, over).items()
    }
    for number, run in enumerate(runs[:MOST_TIMELINES]):
        name = label_of(number)
        title = f"Run {name}" if len(runs) > 1 else ""
        if run.trace:
            plot = figures.timeline(run.trace, run.summary.stages)
            placed[f"step-{name}"] = PageFigure("step", plot, title)
            placed[f"held-{name}"] = PageFigure("step", figures.memory(run.trace))
        if run.steps.loads is not None:
            placed[f"loads-{name}"] = PageFigure("experts", figures.loads(run.steps.loads, name), title)
    return {name: figure for name, figure in placed.items() if figure.plot is not None}


def _sections(runs: Sequence[RecordedRun], plots: Mapping[str, PageFigure]) -> str:
    content = tables(runs)
    sections = ""
    for key, title in SECTIONS.items():
        boxes = "".join(
            "<div>"
            + (f"<h3>{escape(placed.title)}</h3>" if placed.title else "")
            + f'<div class="figure" id="figure-{name}" style="min-height:{placed.plot.height}px"></div></div>'
            for name, placed in plots.items()
            if placed.section == key
        )
        if boxes and key in ("curves", "evaluation"):
            boxes = f'<div class="grid">{boxes}</div>'
        if boxes or key in content:
            legend = LEGEND if boxes and key == "step" else ""
            table = f'<div id="{key}">{content.get(key, "")}</div>'
            sections += f"<section><h2>{title}</h2>{boxes}{legend}{table}</section>"
    return sections


def _json(value: object) -> str:
    """Return JSON that can stand in a script: no text in it ends that."""
    return json.dumps(value).replace("<", "\\u003c")

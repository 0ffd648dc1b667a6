"""Pages of runs in headless Chromium, on a screen and on a phone: skipped without it, or without bokeh."""

import json
import math
import shutil
import tempfile
from pathlib import Path

import pytest
from browser import BROWSER, WIDTHS, page_in_browser
from folders import ROOT

from mpitrain.commands.report_page import main

pytest.importorskip("bokeh", reason="pip install 'mpitrain[report]'")
if BROWSER is None:
    pytest.skip("no chromium", allow_module_level=True)

GOLDEN = ROOT / "tests/golden/run-form-1"
MARKUP = "</script><img src=http://example.invalid onerror=alert(1)>"
MOST_BYTES, MOST_S, MOST_ZOOM_S = 5e6, 3.0, 1.0
TURNS = 6  # of the wheel
TIMELINE = "document.getElementById('figure-step-A')"


def folder_of(tmp_path, name, lines, **files):
    run = tmp_path / name
    run.mkdir()
    shutil.copy(GOLDEN / "config.toml", run)
    (run / "metrics.jsonl").write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    for stem, content in files.items():
        (run / stem.replace("_", ".")).write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    return run


def step_line(step, **more):
    comm = {"tp": {"bytes": 10, "blocked_s": 0.5, "overlapped_s": 0.25}}
    times = {"tokens": 8 * step, "tokens_per_s": 16.0, "step_s": 0.5, "mfu": 0.4, "hfu": 0.5}
    return {"step": step, "loss": 9 / step, "grad_norm": 2 + math.sin(step), **times, "comm": comm, **more}


def trace_of(ranks, count):
    args = {"step": 2, "bytes": 100, "blocked_s": {"tp": 2e-6}, "held": 1 << 20}
    return {
        "traceEvents": [
            {"ph": "X", "cat": "compute", "name": f"{'FB'[i % 2]}{i // ranks % 16}@0", "pid": i % ranks,
             "tid": 0, "ts": i // ranks * 10, "dur": 9, "args": args}
            for i in range(count)
        ]
    }  # fmt: skip


SUMMARY = {
    "nodes": ["a"] * 4 + ["b"] * 4, "axes": {"tp": 2, "cp": 1, "dp": 2, "pp": 2},
    "comm": {"tp": {"bytes": 1.0, "blocked_s": 0.5, "worst_s": 0.7, "worst_rank": 3}}, "slow": {"rank 3": 2},
    "memory": [{"part": "weights", "predicted": 1e6, "measured": 1e6}], "predicted_s": {"computing": 0.1},
    "measured_s": {"computing": 0.2}, "stages": [{"F": 1e-5, "B": 2e-5}],
}  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of five kinds of runs, with a text that each shows."""
    tmp_path = tmp_path_factory.mktemp("pages")
    few = [step_line(step, val_loss=3 / step) for step in range(1, 50)]
    loads = [
        step_line(step, load_cv=0.1, expert_loads={"0": [0.2, 0.8], "mtp.0": [0.5, 0.5]}) for step in (1, 2)
    ]
    ends = [
        {
            "code": code,
            "step": 10,
            "reached": 13,
            "began": "2026-11-29 10:00:00 +0000",
            "time": f"2026-11-29 {hour}:00:00 +0000",
        }
        for code, hour in ((137, 11), (1, 12), (75, 13))
    ]
    ends = "\n".join(map(json.dumps, ends))
    hostile = [
        *few,
        '{"step": 3, "lo',
        "NaN",
        '{"step": 1e999}',
        *[step_line(step, loss=None) for step in range(50, 20_000)],
    ]
    hostile.append(
        step_line(20_000, comm={MARKUP: {"bytes": 1e308, "blocked_s": -1}}, waited_for={MARKUP: 1})
    )
    bad = {
        "ph": "X",
        "name": f"F0@0{MARKUP}",
        "ts": -1e14,
        "dur": 1e14,
        "args": {"step": 2, "blocked_s": {MARKUP: 1}},
    }
    runs = {
        "eight ranks": [folder_of(tmp_path, "eight", few, trace_json=trace_of(8, 400), summary_json=SUMMARY)],
        "experts": [folder_of(tmp_path, "experts", loads)],
        "killed by signal 9": [folder_of(tmp_path, "killed", few, ends_jsonl=ends)],
        "img src": [
            folder_of(tmp_path, "<img src=x>", hostile, ends_jsonl=MARKUP, trace_json={"traceEvents": [bad]},
                      summary_json={**SUMMARY, "nodes": [MARKUP] * 8, "slow": {MARKUP: 1}})
        ],
    }  # fmt: skip
    runs["differ"] = [*runs["eight ranks"], *runs["experts"], *runs["killed by signal 9"]]
    runs["large"] = [folder_of(tmp_path, "large", few, trace_json=trace_of(64, 50_000))]
    written = {}
    for number, (text, of_page) in enumerate(runs.items()):
        written[text] = tmp_path / f"{number}.html"
        assert main(tuple(map(str, of_page)), str(written[text]), "step", print) == 0
    return written


@pytest.mark.parametrize("width", WIDTHS)
def test_pages_are_drawn_without_an_error_or_a_request(pages, width):
    with tempfile.TemporaryDirectory() as profile, page_in_browser(Path(profile), width) as page:
        for text, path in pages.items():
            assert path.stat().st_size < MOST_BYTES, text
            took_s = page.open(path.as_uri())
            assert took_s < MOST_S, (text, took_s)
            page.screenshot(path.with_suffix(f".{width}.png"))
            assert page.errors == [], text
            assert {url.partition(":")[0] for url in page.requests} <= {"file", "data", "blob"}, text
            assert page.value("document.documentElement.scrollWidth") <= width, text
            assert page.value("document.querySelectorAll('.figure:empty').length") == 0, text
            seen = page.value("document.body.innerText").lower()
            assert text in seen or text in ("eight ranks", "large", "differ"), text


def test_a_step_of_64_ranks_and_50000_instructions_zooms_without_a_stall(pages):
    with tempfile.TemporaryDirectory() as profile, page_in_browser(Path(profile), 1280) as page:
        page.open(pages["large"].as_uri())
        page.screenshot(pages["large"].with_suffix(".png"))
        place = page.value(f"(({TIMELINE}.scrollIntoView(), {TIMELINE}.getBoundingClientRect().toJSON()))")
        plot = "Bokeh.documents.flatMap((shown) => shown.roots()).find((root) => root.tags.length)"
        range_of = f"{plot}.x_range"
        before = page.value(f"{range_of}.end - {range_of}.start")
        before_s = page.busy_s()
        for _ in range(TURNS):
            wheel = {
                "x": place["x"] + 300,
                "y": place["y"] + 200,
                "deltaX": 0,
                "deltaY": -120,
                "modifiers": 2,
            }
            page.ask("Input.dispatchMouseEvent", type="mouseWheel", **wheel)
            page.value(
                "new Promise((shown) => requestAnimationFrame(() => requestAnimationFrame(() => shown(1))))"
            )
        zoom_s = (page.busy_s() - before_s) / TURNS
        print(f"a turn of the wheel takes {1e3 * zoom_s:.0f} ms")
        assert page.value(f"{range_of}.end - {range_of}.start") < 0.7 * before
        assert zoom_s < MOST_ZOOM_S
        _, _, all_boxes, _, drawn, _ = (f"{plot}.tags[{n}].data.left?.length" for n in range(6))
        assert (page.value(all_boxes), page.value(drawn)) == (50_000, 0)
        assert page.value(f"{plot}.tags[0].data.image.some((row) => row.some((pixel) => pixel))")
        page.screenshot(pages["large"].with_suffix(".zoomed.png"))
        page.value(f"{range_of}.setv({{start: 1, end: 1.2}})")
        page.value("new Promise((shown) => setTimeout(shown, 200))")
        assert 0 < page.value(drawn) <= 4000 and not page.value(f"{plot}.tags[1].visible")
        page.screenshot(pages["large"].with_suffix(".boxes.png"))
        assert page.errors == []

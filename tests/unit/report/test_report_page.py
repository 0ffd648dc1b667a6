"""Pages of runs, from run directories that are whole, damaged, a stranger's or large."""

import json
import math
import shutil
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from folders import ROOT

from mpitrain.commands.report_page import main
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.report.curves import evaluated
from mpitrain.report.recorded_run import MOST_BOXES, RunEnd, read_run
from mpitrain.report.run_ends import by_class, reliability
from mpitrain.report.series import MOST_POINTS, StepReader, thinned
from mpitrain.report.tables import _class_of, tables

GOLDEN = ROOT / "tests/golden/run-form-1"
MARKUP = "<img src=x onerror=alert(1)>"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / f"run {MARKUP} $$x$$"
    folder.mkdir()
    shutil.copy(GOLDEN / "config.toml", folder)
    return folder


def write_metrics(run, *lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (run / "metrics.jsonl").write_text("\n".join(texts))
    return run / "metrics.jsonl"


def step_line(step, **more):
    comm = {"tp": {"bytes": 10, "blocked_s": 0.5, "overlapped_s": 0.25}}
    return {"step": step, "loss": 1 / step, "tokens": 8 * step, "step_s": 0.5, "comm": comm, **more}


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href") or name.startswith("on")]


def page_of(tmp_path, *runs, over="step"):
    pytest.importorskip("bokeh", reason="pip install 'mpitrain[report]'")
    out = tmp_path / "report.html"
    assert main(tuple(map(str, runs)), str(out), over, print) == 0
    return out.read_text()


def test_damaged_lines_are_counted_and_the_last_of_a_step_counts(run):
    odd = ['{"step": 1e400}', '{"step": -1}', "NaN", "[]", '{"step": 4, "loss": "x"}', '{"step": 9, "lo']
    path = write_metrics(run, step_line(2), step_line(1), *odd, step_line(2, loss=7.0, spike=True))
    steps = StepReader(path).read()
    assert steps.columns["step"].tolist() == [1, 2]
    assert steps.columns["loss"].tolist() == [1, 7]
    assert np.isnan(steps.columns["val_loss"]).all()
    assert (steps.damaged, steps.num_spikes) == (len(odd), 1)
    assert (steps.comm["tp"].bytes, steps.comm["tp"].blocked_s, steps.num_sampled) == (30, 1.5, 3)


def test_a_thinned_curve_keeps_its_spikes_and_ends():
    x = np.arange(100_000.0)
    y = np.sin(x)
    y[[77, 50_001]] = 9, -9
    y[5] = np.nan
    thin_x, thin_y = thinned(x, y)
    assert len(thin_x) <= MOST_POINTS + 2
    assert {77, 50_001, 0, 99_999} <= set(thin_x.tolist())
    assert (thin_y == y[thin_x.astype(int)]).all() and (np.diff(thin_x) > 0).all()


def test_a_page_quotes_what_a_run_says_and_asks_for_nothing(run, tmp_path):
    write_metrics(run, *(step_line(step, comm={MARKUP: {"bytes": 1}}) for step in (1, 2, 3)))
    (run / "ends.jsonl").write_text(
        json.dumps({"code": 75, "step": 2, "time": "</script><h1>", "job": MARKUP})
    )
    numbers = {"loss": 1.5, MARKUP: 2}
    (run / "evaluations.jsonl").write_text(
        json.dumps({"step": MARKUP, "data": {MARKUP: numbers}}) + "\n[]\n{"
    )
    event = {"ph": "X", "name": f"F0@0{MARKUP}</script>", "ts": 1, "dur": 2, "args": {"step": 2}}
    (run / "trace.json").write_text(json.dumps({"traceEvents": [event]}))
    text = page_of(tmp_path, run, run)
    tags = Tags()
    tags.feed(text)
    assert "img" not in tags.tags and tags.links == []
    assert tags.tags.count("h1") == 1
    assert "default-src 'none'" in text
    for said in ("stopped early", "evaluations.jsonl: 2 lines", "loss 1.5", "<h3>Run B</h3>"):
        assert said in text, said


def test_tasks_and_the_noise_scale_are_curves(run):
    evaluations = {"choices": {"acc": 0.5}, MARKUP: {"acc": 1}, "bad": 3}
    lines = [step_line(step, grad_signal=2 - 2 * (step % 2), grad_noise=4.0 * step) for step in range(1, 201)]
    lines[99]["evaluations"] = {"choices": {"acc": 0.25}, MARKUP: {"acc": 1}}
    lines[49]["evaluations"] = evaluations  # no object of objects: the line counts, its evaluations don't
    steps = StepReader(write_metrics(run, *lines)).read()
    assert (steps.num_sampled, steps.damaged) == (64, 0)
    assert np.flatnonzero(np.isfinite(steps.columns["choices/acc"])).tolist() == [99]
    scale = steps.columns["noise_scale"]
    assert np.isnan(scale[0]) and scale[-1] == pytest.approx(4 * np.arange(101, 201).mean() / 1)
    assert [curve.column for curve in evaluated([steps])] == sorted(["choices/acc", f"{MARKUP}/acc"])


def test_ends_by_class_and_samples_of_text_are_tables(run, tmp_path):
    ends = [
        {"code": code, "step": 10, "reached": 13, "began": f"2026-11-29 {hour}:00:00 +0000",
         "time": f"2026-11-29 {hour + 1}:00:00 +0000"}
        for hour, code in enumerate((137, 1, 137, 75), 10)
    ]  # fmt: skip
    found = by_class([RunEnd(**end) for end in ends], lambda end: str(end.code))
    assert found["137"] == (2, 2.0, 6) and list(found) == ["137", "1", "75"]
    write_metrics(run, step_line(1, idle={"messages": 0.25, MARKUP: 1}))
    (run / "ends.jsonl").write_text("\n".join(map(json.dumps, ends)))
    sample = {"prompt": f"Say {MARKUP}", "text": "</td>what it said"}
    result = {
        "step": 1,
        "tasks": {"said": {"exact_match": 1.0, "samples": [sample, 3]}, "none": {"samples": 1}},
    }
    (run / "evaluations.jsonl").write_text(json.dumps(result))
    content = tables([read_run(str(run))])
    assert "killed by signal 9" in content["ends"] and "mean hours between" in content["ends"]
    assert "&lt;/td&gt;what it said" in content["samples"] and "<img" not in content["samples"]
    assert "waits for messages" in content["step"] and "250" in content["step"]


def test_goodput_counts_from_the_first_start_to_the_newest_step_or_end():
    end = RunEnd(9, 10, "2026-11-29 11:00:00 +0000", began="2026-11-29 10:00:00 +0000", reached=13)
    ended_s = datetime(2026, 11, 29, 11, tzinfo=UTC).timestamp()
    step_s = np.full(36, 100.0)
    for newest_s, share in ((math.nan, 1.0), (ended_s - 60, 1.0), (ended_s + 3600, 0.5)):
        assert reliability([end], step_s, newest_s) == (1, 1.0, 3, share)
    assert _class_of(end) == "killed by signal 9" == _class_of(RunEnd(137, 1))  # MPICH, and a shell


def test_what_a_live_page_is_sent_is_json_whatever_a_run_says(run):
    """A browser refuses Infinity and NaN."""
    page = pytest.importorskip("mpitrain.report.page", reason="bokeh")
    large = {"step": 1, "loss": 1e308, "mfu": 1e308, "step_s": 1e308, "load_cv": -1e308}
    write_metrics(run, large, {"step": 2, "loss": None, "expert_loads": {MARKUP: [1e308, -1e308]}})

    def refuse(word):
        raise AssertionError(word)

    sent = json.loads(page.state([read_run(str(run))], "hours", "v"), parse_constant=refuse)
    assert "loads-A 0" not in sent["sources"] and "1 line can&#x27;t be read" in sent["tables"]["runs"]


def test_runs_are_compared_over_tokens_and_by_their_keys(run, tmp_path):
    write_metrics(run, step_line(1), step_line(2))
    other = tmp_path / "other"
    shutil.copytree(run, other)
    config = (other / "config.toml").read_text()
    assert "seed = " in config
    config = config.replace("seed = ", 'loggers = ["csv"]\nseed = 7', 1)
    (other / "config.toml").write_text(config)
    text = page_of(tmp_path, run, other, over="tokens")
    assert "Keys that differ" in text and "run.seed" in text
    assert "<td>[&quot;csv&quot;]</td>" in text  # a list as a configuration has it


def test_a_step_of_64_ranks_and_50000_instructions_fits(run, tmp_path):
    write_metrics(run, *(step_line(step) for step in range(1, 20_001)))
    events = [
        {
            "ph": "X",
            "name": f"F{i}@0",
            "pid": i % 64,
            "tid": 0,
            "ts": i // 64 * 10,
            "dur": 9,
            "args": {"step": 2},
        }
        for i in range(MOST_BOXES + 100)
    ]
    (run / "trace.json").write_text(json.dumps({"traceEvents": events}))
    text = page_of(tmp_path, run)
    assert len(text) < 5e6
    assert f"{MOST_BOXES:,} of {len(events):,} instructions" in text


def test_a_run_without_a_step_has_a_page_and_what_is_no_run_is_refused(run, tmp_path):
    assert "Configuration" in page_of(tmp_path, run)
    (run / "metrics.jsonl").symlink_to("/etc/passwd")
    assert read_run(str(run)).steps.columns == {}
    with pytest.raises(CheckpointError, match=r"no config\.toml"):
        read_run(str(tmp_path))
    with pytest.raises(ConfigError, match="html"):
        main((str(run),), str(Path(tmp_path) / "x.pdf"), "step", print)

"""Curves of runs as they are read, and the pictures of a paper and of a run's end."""

import io
import json
import shutil
import sys
import xml.etree.ElementTree as ET

import pytest
from folders import ROOT
from rich.console import Console

from mpitrain.cluster.rundir import RunDir, lines_of
from mpitrain.commands.report_page import plot
from mpitrain.errors import ConfigError
from mpitrain.report import run_picture
from mpitrain.report.recorded_run import read_run
from mpitrain.report.series import StepReader
from mpitrain.report.terminal import screen

GOLDEN = ROOT / "tests/golden/run-form-1"
MARKUP = "<img src=x>&$x_1$"


def line(step, **more):
    comm = {MARKUP: {"bytes": 10, "blocked_s": 0.5, "overlapped_s": 0.25}}
    return json.dumps(
        {"step": step, "loss": 9 / step, "tokens": 8 * step, "step_s": 36.0, "comm": comm, **more}
    )


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / MARKUP
    folder.mkdir()
    shutil.copy(GOLDEN / "config.toml", folder)
    return RunDir(folder)


def losses(reader):
    return reader.read().columns["loss"].tolist()


def test_a_file_that_grows_is_read_piece_by_piece(run):
    reader = StepReader(run.metrics)
    text = "\n".join(line(step) for step in (1, 2, 3))
    for length in range(0, len(text) + 1, 37):
        run.metrics.write_text(text[:length])
        whole = text[:length].count("\n") + text[:length].endswith("}}}")
        assert len(losses(reader)) == whole, length
    assert reader.read().damaged == 1  # the last is torn
    run.metrics.write_text(f"{text}\n{line(3, loss=7)}\n")
    assert losses(reader) == [9, 4.5, 7] and reader.read().damaged == 0


def test_a_line_without_an_end_is_not_read_on(run):
    with open(run.metrics, "wb") as file:
        file.write(f"{line(1)}\n".encode())
        file.truncate(1 << 40)
    steps = StepReader(run.metrics).read()
    assert steps.columns["step"].tolist() == [1] and steps.damaged == 1


def test_a_file_that_a_resuming_run_cut_is_read_again(run):
    reader = StepReader(run.metrics)
    run.metrics.write_text("".join(f"{line(step)}\n" for step in (1, 2, 3)))
    assert len(losses(reader)) == 3
    run.metrics.write_text("".join(f"{line(step, loss=5)}\n" for step in (1, 2, 3, 4)))
    assert losses(reader) == [5] * 4
    other = run.metrics.with_name("new")
    other.write_text(f"{line(1)}\n")
    other.rename(run.metrics)
    assert losses(reader) == [9]


def test_a_line_after_a_torn_one_is_whole(run):
    """What was killed while it wrote a result takes no later one with it."""
    run.evaluations.write_text('{"step": 1}\n{"step": 2, "da')
    run.append_evaluation('{"step": 3}')
    run.append_evaluation('{"step": 4}')
    assert [step for _, step in lines_of(run.evaluations) if step] == [1, 3, 4]


def test_a_run_draws_what_it_has(run):
    assert "can't be drawn" in run_picture.write(run)
    for lines in (
        "",
        line(1),
        '{"step": 0, "val_loss": 3}',
        line(1, loss=None),
        line(1) + "\n" + line(9, val_loss=2),
    ):
        run.metrics.write_text(lines)
        assert run_picture.write(run) == ""
        texts = [
            node.text for node in ET.fromstring(run.picture.read_text()).iter() if node.tag.endswith("text")
        ]
    assert {"training loss, nats", "validation loss, nats", "blocked", MARKUP[:10]} <= set(texts)
    assert "750" in texts  # ms of the axis
    run.picture.unlink()
    run.picture.symlink_to(run.config)
    before = run.config.read_text()
    run_picture.write(run)
    assert run.config.read_text() == before


LOADS = {"0": [0.25, 0.75], MARKUP: [1.0], "2": []}


def with_loads(run, *odd):
    lines = [line(step, load_cv=0.5 / step) for step in range(1, 4)]
    run.metrics.write_text("\n".join([*lines, line(4, load_cv=0.1, expert_loads=LOADS), *odd]) + "\n")


def test_a_run_with_experts_draws_their_loads(run):
    with_loads(run)
    assert run_picture.write(run).endswith("loads.svg")
    drawn = run.loads.read_text()
    nodes = ET.fromstring(drawn).iter()
    texts = [node.text for node in nodes if node.tag.endswith("text")]
    assert {"loads in step 4, over the mean", "0", MARKUP[:10]} <= set(texts)
    boxes = "M500.0 34.0h120.0", "M620.0 34.0h120.0", "M500.0 134.0h120.0"  # two experts; a block of one
    assert [drawn.count(box) for box in boxes] == [1] * 3 and drawn.count("M620.0 134.0h") == 0
    # 0.25 and 0.75 of two experts are 0.5 and 1.5 of the mean
    assert all(f'fill-opacity="{shade}" d="{box}' in drawn for shade, box in zip(("0.25", "0.75"), boxes))
    run_picture.write(run)
    assert run.loads.read_text() == drawn


@pytest.mark.parametrize(
    "odd",
    [
        "[" * 100_000,
        '{"step": 5, "expert_loads": 3}',
        '{"step": 5, "expert_loads": {"0": ["x"]}}',
        '{"step": 5, "expert_loads": {"0": [1e308, -1e308]}}',
        '{"step": 5, "loss": 1e308, "load_cv": -1e308}\n{"step": 6, "loss": -1e308}',
        '{"step": 9007199254740992, "loss": 3e38}',
        "\x1b[2J",
    ],
)
def test_lines_of_somebody_else_end_no_run(run, odd):
    with_loads(run, odd)
    assert run_picture.write(run).isprintable()
    ET.fromstring(run.picture.read_text())
    run.metrics.write_text(f"{odd}\n")
    assert run_picture.write(run).isprintable()
    drawn = run.picture.read_text()
    ET.fromstring(drawn)
    assert "nan" not in drawn and "inf" not in drawn


def test_a_step_of_a_loss_that_has_diverged_is_drawn(run):
    """A difference to the loss beside it is nothing in float64."""
    run.metrics.write_text(line(1, loss=1e20) + "\n")
    assert run_picture.write(run) == ""
    assert "training loss, nats" in run.picture.read_text()


def test_what_prevents_a_picture_is_reported(run, monkeypatch):
    with_loads(run)
    run.loads.with_name("loads.svg.tmp").mkdir()
    assert "loads.svg can't be drawn: Is a directory" in run_picture.write(run)
    assert run.picture.exists() and not run.loads.exists()
    run.loads.symlink_to(run.config)
    run.loads.with_name("loads.svg.tmp").rmdir()
    before = run.config.read_text()
    assert run_picture.write(run).endswith("loads.svg")
    assert run.config.read_text() == before and not run.loads.is_symlink()
    monkeypatch.setattr(run_picture, "MOST_METRICS", 9)
    assert "isn't drawn of so many steps: mpitrain report " in run_picture.write(run)


def test_ticks_are_round_and_few():
    for low, high, marks in (
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (5.41, 4e3, [1e3, 2e3, 3e3, 4e3]),
        (3.98, 4.05, None),
    ):
        drawn = run_picture.ticks(low, high)
        assert 3 <= len(drawn) <= 7 and (marks is None or drawn == pytest.approx(marks))
        assert all(low <= tick <= high for tick in drawn)


@pytest.mark.parametrize(("width", "height"), [(100, 30), (21, 8), (12, 3), (1, 1)])
def test_a_terminal_of_any_size_has_curves(run, width, height):
    run.metrics.write_text("\n".join(line(step, grad_norm=step) for step in (1, 2, 3)))
    console = Console(file=io.StringIO(), width=width)
    console.print(screen([read_run(str(run.path))], "step", width, height, plain=True))
    drawn = console.file.getvalue()
    assert max(map(len, drawn.splitlines())) <= width
    assert width < 100 or (drawn.count("*") > 9 and "training loss" in drawn and "gradient norm" in drawn)


def test_a_picture_without_matplotlib_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'mpitrain\[plot\]', or look at .* mpitrain report$"):
        plot((str(run.path),), str(tmp_path / "a.svg"), ("loss",), "step", print)


def test_a_picture_for_a_paper(run, tmp_path):
    pytest.importorskip("matplotlib")
    run.metrics.write_text("\n".join(line(step, grad_norm=step) for step in (1, 2, 3)))
    paths = (str(run.path), str(run.path))
    pictures = []
    for name in ("a.svg", "b.svg", "c.png"):
        assert plot(paths, str(tmp_path / name), ("loss", "grad_norm"), "hours", print) == 0
        pictures.append((tmp_path / name).read_bytes())
    assert pictures[0] == pictures[1] and pictures[2].startswith(b"\x89PNG")
    texts = "".join(ET.fromstring(pictures[0]).itertext())
    assert MARKUP in texts and "hours" in texts and "gradient norm" in texts
    assert "\u00d7" not in texts and "\\times" not in texts  # 2, not 2 x 10^0
    for names, why in ((("x",), "give one of loss"), (("load_cv",), "no run has load_cv")):
        with pytest.raises(ConfigError, match=why):
            plot(paths, str(tmp_path / "d.svg"), names, "step", print)
    with pytest.raises(ConfigError, match=r"\.svg \.png"):
        plot(paths, str(tmp_path / "d.pdf"), ("loss",), "step", print)

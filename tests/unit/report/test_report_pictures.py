"""Curves of runs as they are read, and the pictures of a paper and of a run's end."""

import json
import shutil
import xml.etree.ElementTree as ET

import pytest
from folders import ROOT

from mpitrain.cluster.rundir import RunDir
from mpitrain.commands.report_page import plot
from mpitrain.errors import ConfigError
from mpitrain.report import run_picture
from mpitrain.report.series import StepReader

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


def test_a_file_that_a_resuming_run_cut_is_read_anew(run):
    reader = StepReader(run.metrics)
    run.metrics.write_text("".join(f"{line(step)}\n" for step in (1, 2, 3)))
    assert len(losses(reader)) == 3
    run.metrics.write_text("".join(f"{line(step, loss=5)}\n" for step in (1, 2, 3, 4)))
    assert losses(reader) == [5] * 4
    other = run.metrics.with_name("new")
    other.write_text(f"{line(1)}\n")
    other.rename(run.metrics)
    assert losses(reader) == [9]


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


def test_ticks_are_round_and_few():
    for low, high, marks in (
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (5.41, 4e3, [1e3, 2e3, 3e3, 4e3]),
        (3.98, 4.05, None),
    ):
        drawn = run_picture.ticks(low, high)
        assert 3 <= len(drawn) <= 7 and (marks is None or drawn == pytest.approx(marks))
        assert all(low <= tick <= high for tick in drawn)


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
    for names, why in ((("x",), "give one of loss"), (("load_cv",), "no run has load_cv")):
        with pytest.raises(ConfigError, match=why):
            plot(paths, str(tmp_path / "d.svg"), names, "step", print)
    with pytest.raises(ConfigError, match=r"\.svg \.png"):
        plot(paths, str(tmp_path / "d.pdf"), ("loss",), "step", print)

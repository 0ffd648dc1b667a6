"""The picture of the loads of experts, and that a run which is done doesn't fail for want of it."""

import json
import sys

import pytest
from launch import finished

from mpitrain.comm.base.interpreter import python
from mpitrain.training import expert_loads_picture
from mpitrain.training.expert_loads import KEY, together
from mpitrain.training.expert_loads_picture import draw, draw_in_child


@pytest.fixture
def metrics(tmp_path):
    lines = [
        {"step": 0, "val_loss": 3.0},
        *({"step": step, "load_cv": 0.5} for step in (1, 2, 3)),
        {"step": 4, "load_cv": 0.1, KEY: LOADS},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "metrics.jsonl"


LOADS = {"0": [0.25, 0.75], "2": [0.5, 0.5]}


def test_loads_of_all_ranks_are_in_the_order_of_blocks():
    assert list(together([{"mtp.0": [1.0], "10": [1.0]}, {}, {"2": [1.0], "0": [1.0]}])) == [
        "0",
        "2",
        "10",
        "mtp.0",
    ]


def test_it_is_drawn(metrics):
    assert draw(metrics, metrics.with_name("loads.svg")).endswith("loads.svg")
    assert "loads in step 4" in (text := metrics.with_name("loads.svg").read_text()) and "</svg>" in text
    draw(metrics, metrics.with_name("again.svg"))
    assert metrics.with_name("again.svg").read_text() == text


def test_without_loads_there_is_none(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "load_cv": 0.5}\n')
    assert (
        draw(tmp_path / "metrics.jsonl", tmp_path / "loads.svg") == ""
        and not (tmp_path / "loads.svg").exists()
    )


def test_what_prevents_it_is_reported(metrics, monkeypatch):
    assert "can't be drawn: No such file or directory" in draw(
        metrics, metrics.parent / "nowhere" / "loads.svg"
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'mpitrain[plot]'" in draw(metrics, metrics.with_name("loads.svg"))


ODD = [
    "{",
    "[" * 100_000,
    '{"step": 5, "expert_loads": 3}',
    '{"step": 5, "expert_loads": {"0": [1, 2], "1": [1]}}',
]
ODD += [
    '{"step": 5, "expert_loads": {"$\\\\frac{$": [1.0]}}',
    '{"step": 5, "expert_loads": {"0": ["x"]}}',
    '{"step": Infinity}',
    "\x1b[2J",
]


@pytest.mark.parametrize("line", ODD, ids=range(len(ODD)))
def test_a_line_of_somebody_else_is_reported(metrics, line):
    with metrics.open("a") as file:
        file.write(line + "\n")
    message = draw(metrics, metrics.with_name("loads.svg"))
    assert (
        "can't be drawn: line 6 of metrics.jsonl: " in message
        and message.isprintable()
        and len(message) < 600
    )
    assert not metrics.with_name("loads.svg").exists()


def test_nothing_is_drawn_through_a_link(metrics, tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "loads.svg").symlink_to(tmp_path / "victim")
    assert draw(metrics, tmp_path / "loads.svg").endswith("loads.svg")
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "loads.svg").is_symlink()
    metrics.rename(tmp_path / "elsewhere")
    metrics.symlink_to(tmp_path / "elsewhere")
    assert "can't be drawn: it is a symbolic link" in draw(metrics, tmp_path / "loads.svg")


def test_a_child_draws_the_same_and_the_rank_loads_no_matplotlib(metrics):
    code = (
        "import sys; from pathlib import Path\n"
        "from mpitrain.training.expert_loads_picture import draw_in_child\n"
        "print(draw_in_child(Path(sys.argv[1]), Path(sys.argv[2])))\n"
        "assert 'matplotlib' not in sys.modules"
    )
    child, here = metrics.with_name("child.svg"), metrics.with_name("here.svg")
    run = finished(python("-c", code, str(metrics), str(child)), capture_output=True, text=True, timeout=120)
    assert (run.stdout, run.returncode) == (f"loads of experts: {child}\n", 0), run.stderr
    draw(metrics, here)
    assert child.read_bytes() == here.read_bytes()


def test_a_child_that_takes_too_long_or_fails_is_reported(metrics, monkeypatch):
    to = metrics.with_name("loads.svg")
    monkeypatch.setattr(expert_loads_picture, "python", lambda *_: python("-c", "raise OSError('no room')"))
    assert "can't be drawn: its process ended with 1: OSError: no room" in draw_in_child(metrics, to)
    monkeypatch.setattr(expert_loads_picture, "DRAWN_S", 0.2)
    monkeypatch.setattr(expert_loads_picture, "python", lambda *_: python("-c", "import time; time.sleep(9)"))
    assert "can't be drawn: it took more than 0.2 s" in draw_in_child(metrics, to)

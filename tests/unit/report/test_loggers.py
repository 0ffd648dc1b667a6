"""Loggers without a run: names of numbers, a file that is followed, what a logger's process imports."""

import json
import math
import os
import re
import subprocess
import threading

import pytest

from mpitrain import config
from mpitrain.cluster.rundir import RunDir
from mpitrain.comm.base.interpreter import python
from mpitrain.errors import ConfigError
from mpitrain.report.loggers import logger_process
from mpitrain.report.loggers.catalog import require_loggers
from mpitrain.report.loggers.logger_children import Loggers
from mpitrain.report.loggers.logger_process import FollowedFile, follow
from mpitrain.report.loggers.value_names import values_of


def line(step, **numbers):
    return json.dumps({"step": step, "loss": step / 8, **numbers}) + "\n"


def test_numbers_are_called_as_in_the_field():
    values = values_of(
        {
            "step": 3,
            "time": 1e9,
            "loss": 1.5,
            "val_loss": None,
            "mfu": 0.25,
            "spike": True,
            "load_cv": 0.1,
            "comm": {"pp": {"bytes": 8}},
            "waited_for": {"1": 0.5},
            "expert_loads": {"0": [0.5, 0.5]},
            "saves": [{"step": 2}],
        }
    )
    assert math.isnan(values.pop("eval/loss"))
    assert values == {
        "train/loss": 1.5,
        "perf/mfu": 0.25,
        "train/spike": True,
        "train/load_cv": 0.1,
        "perf/comm/pp/bytes": 8,
    }


class Noting:
    """A logger that notes what it is heard; `then` is called after its first flush."""

    def __init__(self, heard, then):
        self._heard = heard
        self._then = then
        heard.append("begin")

    def log(self, step, values, time):
        self._heard.append(step)

    def flush(self):
        self._then.pop()() if self._then else None

    def end(self):
        self._heard.append("end")


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(1) + line(2) + line(3))
    return path


def followed(path, *changes, place=None):
    """Return what a logger is heard while the file changes, a change after each flush."""
    heard, over = [], threading.Event()
    over.wait = lambda seconds: None
    steps = [over.set, *reversed(changes)]

    def begin(resumed):
        logger = Noting(heard, steps)
        heard[-1] = "resume" if resumed else "begin"
        return logger

    follow(path, begin, over, place)
    return heard


def test_lines_come_once_and_a_torn_one_when_it_is_whole(metrics):
    half = line(4)[:9], line(4)[9:] + line(5)

    def append(text):
        return lambda: metrics.open("a").write(text)

    heard = followed(metrics, append(half[0]), append(half[1]), append("damaged\n" + line(6)))
    assert heard == ["begin", 1, 2, 3, 4, 5, 6, "end"]


def test_after_a_rollback_another_logger_gets_all_lines(metrics):
    longer = line(1) + line(2, lr=0.5) + line(3, lr=0.5) + line(4)
    heard = followed(metrics, lambda: metrics.write_text(longer))
    assert heard == ["begin", 1, 2, 3, "end", "begin", 1, 2, 3, 4, "end"]
    heard = followed(metrics, lambda: metrics.write_text(line(1)))
    assert heard == ["begin", 1, 2, 3, 4, "end", "begin", 1, "end"]
    heard = followed(metrics, metrics.unlink)
    assert heard == ["begin", 1, "end", "begin", "end"]


def test_one_that_resumes_gets_what_came_after_and_all_after_a_cut(metrics, tmp_path):
    place = tmp_path / "place"
    assert followed(metrics, place=place) == ["begin", 1, 2, 3, "end"]
    assert followed(metrics, place=place) == ["resume", "end"]
    metrics.open("a").write(line(4))
    assert followed(metrics, place=place) == ["resume", 4, "end"]
    longer = line(1) + line(2) + line(3, lr=0.5) + line(4, lr=0.5)
    assert followed(metrics, lambda: metrics.write_text(longer), place=place)[:3] == [
        "resume",
        "end",
        "begin",
    ]
    metrics.write_text(line(1) + line(2))  # a restart from the step before
    assert followed(metrics, place=place) == ["begin", 1, 2, "end"]
    for content in (b"", b"x", b"-3\n", b"7\nlonger than seven bytes\n"):
        place.write_bytes(content)
        assert followed(metrics, place=place) == ["begin", 1, 2, "end"]


def test_lines_that_are_appended_are_no_cut(metrics):
    file = FollowedFile(metrics)
    assert len(list(file.new_lines())) == 3
    metrics.open("a").write(line(4))
    assert not file.is_cut() and len(list(file.new_lines())) == 1


@pytest.mark.parametrize("module", ["logger_children", "logger_process"])
def test_no_library_of_loggers_and_no_torch_is_imported(module):
    script = f"import mpitrain.report.loggers.{module}, sys; print(*sys.modules)"
    done = subprocess.run(python("-c", script), capture_output=True, text=True, check=True)
    heavy = {"torch", "tensorboard", "wandb", "mlflow", "bokeh", "numpy"}
    assert heavy & set(done.stdout.split()) <= {"numpy"}


def test_a_logger_leaves_cores_to_the_ranks_and_hears_no_ctrl_c(tmp_path):
    """Niceness counts among the processes of a session, where Linux shares cores among sessions first."""
    loggers = Loggers(RunDir(tmp_path), ["csv"], [])
    loggers.advance()
    loggers._starting.join()
    child = loggers._running["csv"].pid
    places = [(os.getsid(pid), os.getpgid(pid)) for pid in (0, child)]
    loggers.end()
    assert places[0][0] == places[1][0] and places[1][1] == child and logger_process.NICENESS == 19


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["tensorbord"], "run.loggers: found 'tensorbord'; did you mean tensorboard?"),
        (["csv", "csv"], "run.loggers: 'csv' is given twice"),
        (["csv,wandb"], "run.loggers: found 'csv,wandb'; write a list: "),
        (["none"], "known: tensorboard, csv, wandb, mlflow, and module:name"),
        (["nowhere_at_all:A"], '"nowhere_at_all:A" needs the package nowhere_at_all, which is not installed'),
    ],
)
def test_what_is_no_logger_is_refused(names, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        require_loggers(names)


def test_a_logger_of_a_strangers_run_directory_is_not_loaded():
    tree = {"run": {"loggers": ["csv", "theirs:X", "own:Y"]}}
    with pytest.raises(ConfigError, match='loggers = "theirs:X" in a run directory'):
        config.parse(tree, {"own:Y"})
    assert config.parse(tree, {"own:Y", "theirs:X"}).run.logger_names == ("csv", "theirs:X", "own:Y")

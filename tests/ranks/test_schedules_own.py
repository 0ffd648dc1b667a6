"""A schedule in a file of its own, which this is: pipeline.schedule = "test_schedules_own:EARLY"."""

import inspect
import os
import shutil
import sys

import pytest
from conftest import agree
from folders import ROOT
from launch import finished

from mpitrain.commands.requests import ScheduleRequest
from mpitrain.commands.schedule.command import answer
from mpitrain.errors import ConfigError, ScheduleError
from mpitrain.schedules.actions import Action
from mpitrain.schedules.family import ScheduleFamily, stage_per_rank

EARLY_NAME = "pipeline.schedule=test_schedules_own:EARLY"


def early(num_stages, num_microbatches, stage):
    """Two more forwards than 1F1B before the first backward.

    stage 0 of 2:  F0 F1 F2 B0 F3 B1 ...
    """
    warmup = min(num_stages + 1 - stage, num_microbatches)
    order = [Action("F", number, stage) for number in range(warmup)]
    for number in range(warmup, num_microbatches):
        order += [Action("B", number - warmup, stage), Action("F", number, stage)]
    rest = range(num_microbatches - warmup, num_microbatches)
    return order + [Action("B", number, stage) for number in rest]


EARLY = stage_per_rank(early)
LOOPED = ScheduleFamily(EARLY.rows, takes=("chunks",), placed="looped")
LATE = stage_per_rank(lambda *size: early(*size)[::-1])
NUMBER = 7


def resolved(*overrides, ranks=2):
    from mpitrain import config as settings
    from mpitrain.plan.settings.resolve import resolve

    return resolve(settings.load(None, ("parallel.pp=2", *overrides)), ranks, 256)


def plan(*overrides):
    from mpitrain.model.families.catalog import plan_of

    return plan_of(resolved(*overrides))


def test_its_program_is_made_and_proved():
    text = " ".join(map(str, plan(EARLY_NAME, "batch.global=6").training.table.ranks[0]))
    assert text == "F0@0 F1@0 F2@0 B0@0 F3@0 B1@0 F4@0 B2@0 F5@0 B3@0 B4@0 B5@0"


@pytest.mark.parametrize(
    ("name", "more", "error", "words"),
    [
        (
            "EARLY",
            ("pipeline.segments=2",),
            ScheduleError,
            "segments has no effect on it; it takes no options",
        ),
        ("EARLY", ("pipeline.chunks=2",), ScheduleError, "found 2 chunks, needed 1 a rank"),
        ("LOOPED", (), ScheduleError, "found 1 stage a rank, its ScheduleFamily declares 2; change `placed`"),
        ("LATE", (), ScheduleError, "B23@0 stands before F23@0"),
        (
            "NUMBER",
            (),
            ConfigError,
            "found an int, needed a ScheduleFamily .*; use test_schedules_own:EARLY, ",
        ),
        ("early", (), ConfigError, "found a function, needed a ScheduleFamily"),
    ],
)
def test_what_is_no_schedule_is_refused(name, more, error, words):
    with pytest.raises(error, match=words):
        _ = plan(f"pipeline.schedule=test_schedules_own:{name}", *more).training


def test_it_is_played_by_name():
    text = answer(ScheduleRequest(name="test_schedules_own:EARLY", stages=2, microbatches=6))
    assert text.startswith("test_schedules_own:EARLY") and "bubble" in text


@pytest.mark.mpi(min_size=2)
def test_it_trains_to_the_bits_of_1f1b(world):
    from training import resolved as settled
    from training import train

    if world.size != 2:
        pytest.skip("runs on 2 ranks")
    keys = "parallel.pp=2", "batch.global=8"
    (lines, _), (own, _) = (train(world, settled(world, *keys, *more)) for more in ((), (EARLY_NAME,)))
    agree(world, lines == own, f"{own}, not {lines}")


def test_a_schedule_is_one_file(tmp_path):
    """A file in schedules/families/ of a copy of the tree is all that a new name takes."""
    for top in ("mpitrain", "schedules", "comm", "jobs"):
        shutil.copytree(ROOT / top, tmp_path / top, symlinks=True)
    source = f"{inspect.getsource(early)}\n\nEARLY = stage_per_rank(early, 'early')\n"
    imports = "from mpitrain.schedules.actions import Action\n"
    imports += "from mpitrain.schedules.family import stage_per_rank\n"
    (tmp_path / "schedules/families/early.py").write_text(f"{imports}\n\n{source}")
    command = [sys.executable, "-m", "mpitrain", "schedule", "--stages", "2", "--microbatches", "6"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = finished([*command, "early"], env=environment, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rank 0 F0 F1 F2" in done.stdout
    done = finished([*command, "erly"], env=environment, cwd="/", capture_output=True, text=True)
    assert "did you mean 'early'?" in done.stderr
    assert "seq1f1b, early" in done.stderr

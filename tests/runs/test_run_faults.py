"""A fault of one rank, at any moment, ends the whole job within seconds, with one report that names
rank, phase and cause.

MPITRAIN_EFFORT=all plants 300 faults, MPITRAIN_EFFORT=40 as many; by default there are few, of every
kind and in every phase.
"""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from conftest import LONG, WITH_LONG
from effort import cases
from launch import MPITRAIN, Done, loss_lines, mpirun, patience, planted, short, tail, tiny, write_text

from mpitrain.checkpoint.load import steps
from mpitrain.checkpoint.verify import verify

# saving: the thread that does
PHASES = ("start", "tokens", "build", "resume", "step", "validation", "save", "saving", "end")
FAULTS = (
    "exception",
    "memory",
    "full disk",
    "missing file",
    "sys.exit",
    "exit",
    "kill",
    "segfault",
    "stop",
    "slow",
)
OF_A_SAVE = [(phase, fault) for phase in ("save", "saving") for fault in ("full disk", "missing file")]
INPUT_ERRORS = ("DataError: ", "CheckpointError: ")
# which take seconds; a rank that is stopped is found by test_run_hang.py as well
FIRST = (1, 5, 9) if WITH_LONG else (1, 9)
LIMIT_S = 5
CAUSES = {
    "exception": "RuntimeError: planted",
    "memory": "MemoryError: planted",
    "full disk": "No space left on device|File too large",
    "missing file": "No such file or directory|is missing",
    "sys.exit": "SystemExit: 3",
    "exit": "is gone",
    "kill": "is gone",
    "segfault": "is gone",
    "stop": "stopped by a signal",
    "slow": "does nothing|computes or is stuck|waits for no message|is stuck|limit",
}
# kind_of asks whether there is a file: no is an answer.  No run ends for want of lines of metrics.
# Report falls silent where nobody can read, of which rich makes a sys.exit.
HARMLESS = {
    "missing file": r" in (kind_of|RunDir\.metrics|Report\.)",
    "full disk": r" in Report\.",
    "sys.exit": r" in (Report\.|shown|obeyed)",  # the last two look at what Report is about to print
}
SETTINGS = dict(run_steps=6, run_save_every=2, run_eval_every=2, schedule_name="constant", parallel_pp=2)


def plans(count: int) -> list[tuple[int, str, str]]:
    """Return (number, phase, fault) of each fault; all faults in all phases come before any is repeated."""
    every = [(phase, fault) for phase in PHASES for fault in FAULTS]
    random.Random(1).shuffle(every)
    numbers = sorted(range(300), key=lambda number: number not in FIRST)
    return [(number, *every[number % len(every)]) for number in numbers[:count]]


def run(run_dir: Path, text: Path, plan: dict[str, object], **changes) -> Done:
    """Run with a fault planted.

    A rank that is to be found before MPI starts is told by its environment: a fork's in /proc is
    another's.
    """
    command = (
        MPITRAIN,
        "run",
        *tiny(run_dir, text, **SETTINGS | {"comm_timeout_s": short(LIMIT_S)} | changes),
    )
    env = planted(plan)
    return mpirun(2, *command, env=env, timeout=90, forked=plan["phase"] != "start")


def run_from(half_done: Path | None, run_dir: Path, text: Path, plan: dict[str, object]) -> Done:
    """Run with a fault planted, from the beginning or from what another run has done."""
    if half_done:
        shutil.copytree(half_done, run_dir)
    return run(run_dir, text, plan)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("faults") / "text.txt", 20_000)


@pytest.fixture(scope="module")
def counted(tmp_path_factory, text):
    """A run directory with a checkpoint to resume from, how many calls each phase of each rank has,
    and the loss lines without a fault.

    Those of `resume` are of a run that resumes from a checkpoint; the others of one from its
    beginning.
    """
    folder = tmp_path_factory.mktemp("counted")
    counts = []
    losses = []
    for which, phases in (("fresh", set(PHASES) - {"resume"}), ("resumed", {"resume"})):
        plan = {"rank": None, "phase": "", "call": 0, "fault": "count", "file": str(folder / which)}
        done = run(folder / "run", text, plan, comm_timeout_s=200)
        assert done.returncode == 0, tail(done.output)
        found = [json.loads((folder / f"{which}.{rank}").read_text()) for rank in range(2)]
        losses = losses or loss_lines(folder / "run")
        counts.append([{phase: count for phase, count in each.items() if phase in phases} for each in found])
        for late in (4, 6):  # the run stopped before
            shutil.rmtree(folder / "run" / "checkpoints" / f"step-{late:08d}")
    return folder / "run", [fresh | resumed for fresh, resumed in zip(*counts, strict=True)], losses


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("number", "phase", "fault"), plans(cases(len(FIRST), 300)))
def test_a_fault_of_one_rank_ends_the_job_with_one_report(tmp_path, text, counted, number, phase, fault):
    half_done, calls, losses = counted
    dice = random.Random(number)
    rank = dice.randrange(2)
    plan = {
        "rank": rank,
        "phase": phase,
        "call": 1 + int(0.95 * dice.random() * calls[rank][phase]),
        "fault": fault,
    }
    done = run_from(half_done if phase == "resume" else None, tmp_path / "run", text, plan)
    while f"planted {fault}" not in done.output:  # this run waited less, and made fewer calls
        assert done.returncode == 0 and plan["call"] > 1, f"{plan}\n{tail(done.output)}"
        plan["call"] //= 2
        shutil.rmtree(tmp_path / "run")
        done = run_from(half_done if phase == "resume" else None, tmp_path / "run", text, plan)
    if (phase, fault) in OF_A_SAVE and (said := re.search(r"step \d is not saved: .*", done.output)):
        assert done.returncode in (0, 1), f"{plan}\n{tail(done.output)}"
        assert re.search(CAUSES[fault], said[0]), f"{plan}\n{tail(done.output)}"
        return
    if done.returncode == 0 and re.search(HARMLESS.get(fault, "$^"), done.output):
        assert loss_lines(tmp_path / "run") == losses, f"{plan}\n{tail(done.output)}"
        return
    assert done.returncode not in (0, None), f"{plan}\n{tail(done.output)}"
    reports = [line for line in done.output.splitlines() if line.startswith(("mpitrain: ", *INPUT_ERRORS))]
    message = " ".join(reports)
    # what is wrong with a file is told as bad input, whoever finds it
    if reports and reports[0].startswith(INPUT_ERRORS):
        assert done.returncode == 2 and len(reports) == 1 and re.search(CAUSES[fault], message), (
            f"{plan}\n{tail(done.output)}"
        )
        return
    assert (
        len([line for line in reports if " failed" in line or "is gone" in line or "stuck" in line]) <= 1
    ), f"{plan}\n{message}"
    where = "in phase" if phase == "saving" else f"in phase {phase}"
    named = re.search(rf"rank {rank}\b", message) and where in message and re.search(CAUSES[fault], message)
    assert named, f"{plan}\n{tail(done.output)}"


# ---------------------------------------------------------------- a rank that can start no thread


@LONG
@pytest.mark.parametrize(("rank", "phase"), [(1, "step"), (0, "build")])
def test_a_rank_that_can_have_no_thread_saves_reads_and_logs_in_the_foreground(
    tmp_path, text, counted, rank, phase
):
    _, _, losses = counted
    plan = {"rank": rank, "phase": phase, "call": 50, "fault": "no threads"}
    done = run(tmp_path / "run", text, plan, comm_timeout_s=60, run_loggers='["csv"]')
    assert done.returncode == 0 and loss_lines(tmp_path / "run") == losses, tail(done.output)
    warned = re.findall(
        rf"mpitrain: rank {rank} .*: no thread can be started, writing a shard of step (\d) in the fore",
        done.output,
    )
    assert len((tmp_path / "run/loggers/csv/metrics.csv").read_text().splitlines()) == 8
    assert warned == ["2", "4", "6"], tail(done.output)
    assert "(ulimit -u)" in done.output, tail(done.output)
    assert "Traceback" not in done.output, tail(done.output)
    assert steps(tmp_path / "run" / "checkpoints") == [2, 4, 6]
    for step in (2, 4, 6):
        verify(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")


def test_a_rank_that_can_have_no_thread_ends_the_job_at_once(tmp_path, text):
    done = run(
        tmp_path / "run",
        text,
        {"rank": 0, "phase": "step", "call": 50, "fault": "no threads and exception"},
        comm_timeout_s=60,
    )
    assert (
        done.returncode == 1
        and "failed in phase step" in done.output
        and "can't start new thread" not in done.output
    ), tail(done.output)
    # what MPI_Abort prints isn't asked for: a launcher that ends at once may lose it
    assert done.wall_s < patience(30), tail(done.output)


def test_a_rank_that_can_have_no_thread_from_its_start_is_refused_by_one_message(tmp_path, text):
    plan = {"rank": 1, "phase": "", "call": 0, "fault": "none", "threadless": True}
    command = MPITRAIN, "run", *tiny(tmp_path / "run", text, **SETTINGS)
    done = mpirun(2, *command, env=planted(plan), timeout=90, forked=False)
    said = [
        line for line in done.output.splitlines() if "no thread can be started; this user may have" in line
    ]
    assert done.returncode == 2, tail(done.output)
    assert len(said) == 1, tail(done.output)
    assert "Traceback" not in done.output, tail(done.output)

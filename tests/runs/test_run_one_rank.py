"""What is wrong on one rank alone is told once, with the rank, and ends all.

No rank waits for one that has left.
"""

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import LONG
from launch import (
    MPIRUN,
    MPITRAIN,
    lines_in,
    mpirun,
    planted,
    preloaded,
    run_tiny,
    short,
    started,
    tail,
    tiny,
    write_text,
)

import mpitrain

ONLY_RANK_1 = 'if test "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 1; then %s; fi; exec "$0" "$@"'
EARLY = "rank 0: F0@0 F1@0 B0@0 B1@0\nrank 1: F0@1 B0@1 F1@1 B1@1\n"
LATE = "rank 0: F0@0 F1@0 B0@0 B1@0\nrank 1: F0@1 F1@1 B0@1 B1@1\n"
CLASSES = ("ConfigError:", "MeshError:", "ScheduleError:", "DataError:", "CheckpointError:")


@pytest.fixture
def folder(tmp_path):
    """Two nodes' local disks, and the file system that they share."""
    for name in ("here", "there", "shared"):
        (tmp_path / name).mkdir()
    write_text(tmp_path / "shared" / "text.txt", 6000)
    return tmp_path


def refused(folder, change, words, *arguments):
    """Run on two ranks, of which rank 1 does `change` first.

    Expect one message that holds `words`, and nothing written.
    """
    before = sorted(folder.rglob("*"))
    command = [MPITRAIN, "run", *arguments]
    # or what is loaded already is not from there
    command = command if "PYTHONPATH" in change else preloaded(command)
    done = mpirun(2, "sh", "-c", ONLY_RANK_1 % change, *command, cwd=folder / "here", timeout=40)
    assert done.returncode == 2, f"exit code {done.returncode}\n{tail(done.output)}"
    messages = [line for line in done.output.splitlines() if line.startswith(CLASSES)]
    assert len(messages) == 1 and "Traceback" not in done.output, done.output
    assert all(word in messages[0] for word in words), f"{words} not in: {messages[0]}"
    assert sorted(folder.rglob("*")) == before
    return messages[0]


def usual(folder, **changes):
    run_dir = changes.pop("run_dir", folder / "shared" / "run")
    return tiny(run_dir, folder / "shared" / "text.txt", run_steps=1, comm_timeout_s=short(20), **changes)


# ------------------------------------------------- input that only one rank lacks, or has otherwise


def test_a_configuration_that_one_node_lacks(folder):
    (folder / "here" / "my.toml").write_text("[run]\nsteps = 1\n")
    refused(folder, "cd ../there", ["my.toml", "No such file", "on rank 1 only"], "my.toml", *usual(folder))


def test_a_tokenizer_that_one_node_lacks_is_not_missed(folder):
    """Rank 0 alone reads it."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({chr(number): number for number in range(128)}, unk_token=" ")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "here" / "tokenizer.json"))
    command = MPITRAIN, "run", *usual(folder, data_tokenizer="tokenizer.json")
    done = mpirun(
        2, "sh", "-c", ONLY_RANK_1 % "cd ../there", *preloaded(command), cwd=folder / "here", timeout=40
    )
    assert done.returncode == 0 and "done: 1 step" in done.output, tail(done.output)


def test_a_schedule_file_that_one_node_lacks(folder):
    (folder / "here" / "mine.txt").write_text(EARLY)
    given = usual(folder, pipeline_schedule="mine.txt", parallel_pp=2, batch_global=2, batch_micro=1)
    refused(folder, "cd ../there", ["mine.txt", "on rank 1 only"], *given)


def test_a_run_directory_that_is_not_shared(folder):
    words = [
        "run.dir = runs/mine",
        str(folder / "there" / "runs" / "mine"),
        "all nodes share",
        "on rank 1 only",
    ]
    refused(folder, "cd ../there", words, *usual(folder, run_dir="runs/mine"))


def test_a_configuration_that_differs(folder):
    (folder / "here" / "my.toml").write_text("[run]\nsteps = 1\n")
    (folder / "there" / "my.toml").write_text("[run]\nsteps = 1\nseed = 2\n")
    refused(folder, "cd ../there", ["run.seed: found 2 on rank 1, 1 on rank 0"], "my.toml", *usual(folder))


def test_a_schedule_table_that_differs(folder):
    (folder / "here" / "mine.txt").write_text(EARLY)
    (folder / "there" / "mine.txt").write_text(LATE)
    given = usual(folder, pipeline_schedule="mine.txt", parallel_pp=2, batch_global=2, batch_micro=1)
    refused(folder, "cd ../there", ["the table of pipeline.schedule", "on rank 1"], *given)


def test_code_that_differs(folder):
    shutil.copytree(
        Path(mpitrain.__file__).parent,
        folder / "there" / "mpitrain",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    with open(folder / "there" / "mpitrain" / "balance.py", "a") as file:
        file.write("# of yesterday\n")
    other = f"export PYTHONPATH='{folder / 'there'}' PYTHONDONTWRITEBYTECODE=1"
    refused(folder, other, ["the code of mpitrain", "on rank 1"], *usual(folder))


def test_a_library_that_one_node_lacks(folder):
    """The rank fails before it has started MPI, where the other one waits for it."""
    (folder / "there" / "msgspec.py").write_text(
        "raise ImportError('libmsgspec.so: cannot open shared object file')\n"
    )
    shadow = ONLY_RANK_1 % f"export PYTHONPATH='{folder / 'there'}'"
    done = mpirun(2, "sh", "-c", shadow, MPITRAIN, "run", *usual(folder), timeout=15)
    assert done.returncode == 2 and "Traceback" not in done.output, tail(done.output)
    message = (
        "mpitrain: rank 1 of 2 failed in phase start, starting: LibraryError: a library can't be loaded: "
        "libmsgspec.so: cannot open"
    )
    assert message in done.output, tail(done.output)


# ---------------------------------------------------------------- ranks that say nothing any more


@LONG
def test_a_stopped_rank_is_named_with_its_instruction(tmp_path):
    """The first of two; the test below stops the other one."""
    rank = 0
    text = write_text(tmp_path / "text.txt")
    run_dir = tmp_path / "run"
    with started(
        2, MPITRAIN, "run", *tiny(run_dir, text, parallel_pp=2, run_steps=5000, comm_timeout_s=short(3))
    ) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 3, 60)
        job.signal(job.ranks()[rank], signal.SIGSTOP)
        done = job.wait(3 + 10)
    assert done.returncode not in (0, None), tail(done.output)
    hang_lines = [line for line in done.output.splitlines() if "cause of the hang" in line or "stuck" in line]
    assert len(hang_lines) == 1, tail(done.output)
    assert re.search(
        rf"rank {rank} \(pp {rank},.*at step \d+, position \d+, in phase step,.*stopped by a signal",
        hang_lines[0],
    ), hang_lines


@LONG
def test_on_two_nodes_one_speaks_for_both(tmp_path):
    """The watchdog of the stopped rank knows why; the other one's knows who waits for it, and asks."""
    if b"HYDRA" not in subprocess.run([MPIRUN, "--version"], capture_output=True, check=False).stdout:
        pytest.skip("MPICH's launcher makes two nodes of one machine")
    text = write_text(tmp_path / "text.txt")
    run_dir = tmp_path / "run"
    plan = {"rank": 1, "phase": "step", "call": 6000, "fault": "stop"}
    given = tiny(run_dir, text, parallel_pp=2, run_steps=5000, comm_timeout_s=short(3))
    nodes = ("-launcher", "fork", "-hosts", "n0:1,n1:1", "-n", "2")
    done = mpirun(0, MPIRUN, *nodes, MPITRAIN, "run", *given, env=planted(plan), timeout=60)
    assert done.returncode not in (0, None) and "nodes: 2" in done.output, tail(done.output)
    reports = [line for line in done.output.splitlines() if line.startswith("mpitrain: ")]
    hang_lines = [line for line in reports if re.search("cause of the hang|stuck for", line)]
    assert len(hang_lines) == 1 and re.search(r"rank 1 \(pp 1,.*stopped by a signal", hang_lines[0]), tail(
        done.output
    )
    assert "rank 1 owes " in done.output and "rank 0 waits for it in the end" in done.output, tail(
        done.output
    )


def test_a_killed_rank_is_named_with_its_phase(tmp_path):
    text = write_text(tmp_path / "text.txt")
    run_dir = tmp_path / "run"
    with started(2, MPITRAIN, "run", *tiny(run_dir, text, parallel_pp=2, run_steps=5000)) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 3, 60)
        job.signal(job.ranks()[1], signal.SIGKILL)
        done = job.wait(15)
    assert done.returncode not in (0, None), tail(done.output)
    gone = [line for line in done.output.splitlines() if "the process is gone" in line]
    assert len(gone) == 1 and re.search(
        r"rank 1 \(pp 1,.* at step \d+, position \d+, in phase step,", gone[0]
    ), tail(done.output)


# ---------------------------------------------------------------- without a watchdog


@pytest.mark.parametrize(
    ("phase", "call", "fault", "message"),
    [
        pytest.param(
            "tokens", 5, "slow", r"rank 0 of 2 in phase tokens, .*: is stuck, for \d+ s", marks=LONG
        ),
        pytest.param(
            "step",
            3000,
            "slow",
            r"rank 1 \(pp 1,.*in phase step, .*: waited \d+ s for F\d+ for stage 1 from rank 0 of links",
            marks=LONG,
        ),
        ("build", 3000, "exception", r"rank 0 \(pp 0,.* failed in phase build, .*: RuntimeError: planted"),
    ],
)
def test_without_a_watchdog_ranks_watch_themselves(tmp_path, phase, call, fault, message):
    plan = {"rank": 0, "phase": phase, "call": call, "fault": fault, "blind": True}
    env = planted(plan)
    text = write_text(tmp_path / "text.txt", 6000)
    done = run_tiny(
        2, tmp_path / "run", text, run_steps=4, parallel_pp=2, comm_timeout_s=short(3), env=env, timeout=40
    )
    assert done.returncode not in (0, None), tail(done.output)
    assert "no watchdog on this node" in done.output, tail(done.output)
    assert re.search(message, done.output), tail(done.output)


def test_a_run_outlives_its_watchdog(tmp_path):
    text = write_text(tmp_path / "text.txt")
    run_dir = tmp_path / "run"
    with started(2, MPITRAIN, "run", *tiny(run_dir, text, parallel_pp=2, run_steps=40)) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 3, 60)
        watchdogs = [
            pid
            for pid in job._pids()
            if b"watchdog" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        ]
        assert len(watchdogs) == 1
        job.signal(watchdogs[0], signal.SIGKILL)
        done = job.wait(60)
    assert done.returncode == 0 and "done: 40 steps" in done.output, tail(done.output)


# ---------------------------------------------------------------- the last save


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("phase", "call"), [("save", 5), pytest.param("saving", 2000, marks=LONG), ("saving", 9_000)]
)
def test_a_full_disk_at_the_last_save_is_never_a_success(tmp_path, phase, call):
    text = write_text(tmp_path / "text.txt")
    run_dir = tmp_path / "run"
    env = planted({"rank": 0, "phase": phase, "call": call, "fault": "full disk"})
    done = run_tiny(2, run_dir, text, run_steps=2, parallel_pp=2, env=env)
    assert "planted full disk" in done.output, "no such call"
    assert done.returncode == 1 and "done: 2 steps" not in done.output, tail(done.output)
    assert re.search(
        r"step 2 is not saved: .*(No space left|too large).*; there is no checkpoint yet", done.output
    ), tail(done.output)
    assert "step 2 could not be saved" in done.output, tail(done.output)
    assert not list((run_dir / "checkpoints").glob("step*")), tail(done.output)

"""Bad input: one message, once, no traceback, exit code 2, nothing written.

And what fails later ends the whole job in seconds.
"""

import json
import re
import resource

import pytest
from conftest import LONG
from launch import (
    MPITRAIN,
    lines_in,
    mpirun,
    options,
    run_commands,
    run_tiny,
    started,
    tail,
    tiny,
    write_text,
)

from mpitrain.cluster.guard import Guard
from mpitrain.cluster.status_board import RankStatus
from mpitrain.cluster.watchdog_client import WatchdogClient
from mpitrain.errors import BAD_INPUT, FAILED, DataError

CLASSES = ("ConfigError:", "MeshError:", "ScheduleError:", "DataError:", "CheckpointError:", "Error:")


def fill(folder):
    """Put a corpus into a folder, and the files of the cases below."""
    write_text(folder / "text.txt", 6000)
    (folder / "empty.txt").touch()
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 20)
    (folder / "folder.toml").mkdir()
    (folder / "broken.toml").write_text("[run\nsteps = 3\n")
    (folder / "binary.toml").write_bytes(b"\xff\xfe\x00\x01")
    (folder / "loop.toml").write_text('base = "pool.toml"\n')
    (folder / "pool.toml").write_text('base = "loop.toml"\n')
    (folder / "number.toml").write_text("base = 3\n")
    (folder / "flat.toml").write_text("run = 3\n")
    # as Windows writes it
    (folder / "unknown.toml").write_bytes(b"\xef\xbb\xbf[run]\r\nstep = 3\r\n")
    (folder / "derived.toml").write_text('base = "nosuch.toml"\n')
    return folder


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path)


def tree(folder):
    """Return every path below a folder, with the content of files."""
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


def refused(folder, num_ranks, words, *command, env=None):
    """Run `command`; check that it was refused as it should be, with a message that holds `words`."""
    before = tree(folder)
    done = mpirun(num_ranks, *command, env=env, cwd=folder, timeout=60)
    require_refused(done, words)
    assert tree(folder) == before


def require_refused(done, words):
    assert done.returncode == 2, f"exit code {done.returncode}\n{tail(done.output)}"
    assert "Traceback" not in done.output, done.output
    messages = [line for line in done.output.splitlines() if line.startswith(CLASSES)]
    assert len(messages) == 1, done.output
    assert all(word in messages[0] for word in words), f"{words} not in: {messages[0]}"


def all_refused(folder, num_ranks, commands):
    """Run commands one after the other in the same ranks.

    Return how each ended, and whether none has written anything.
    """
    before = tree(fill(folder))
    done = run_commands(num_ranks, *commands, cwd=folder)
    return done, tree(folder) == before


# ---------------------------------------------------------------- what two ranks refuse

CASES = {
    "unknown key": (["--set", "run.step=3"], ["run.step", "did you mean run.steps?"]),
    "wrong type": (["--set", "run.steps=many"], ["run.steps", "int", "str"]),
    "layout": (["--set", "parallel.dp=3"], ["3", "ranks, but mpirun started 2"]),
    "a model larger than memory": (["--set", "model.width=1000000000"], ["GiB", "parallel.pp"]),
    "a GPU that isn't there": (
        [*options({"run.device": "cuda"})],
        ['run.device = "cuda"', "finds no GPU", '"cpu" or "auto"'],
    ),
    "more stages than blocks": (
        ["--set", "parallel.pp=2", "--set", "model.layers=1"],
        ["parallel.pp = 2", "model.layers = 1"],
    ),
    "microbatches": (
        [*options({"batch.global": 6, "batch.micro": 2, "parallel.dp": 2})],
        ["batch.global = 6", "multiple of 4"],
    ),
    "a side that fp8 can't multiply": (
        [*options({"precision.compute": "fp8", "model.ffn": 88})],
        ["model.ffn = 88", "multiple of 16", 'precision.compute = "bf16"'],
    ),
    "missing data": (["--set", "data.path=absent.txt"], ["data.path", "absent.txt"]),
    "empty data": (["--set", "data.path=empty.txt"], ["data.path", "empty.txt", "no text"]),
    "binary data": (["--set", "data.path=binary.txt"], ["data.path", "binary.txt", "UTF-8"]),
    "long sequence": (["--set", "data.sequence=5000"], ["data.sequence = 5000", "10002 tokens", "6000"]),
    "broken TOML": (["broken.toml"], ["broken.toml", "not valid TOML", "line 1"]),
    "unwritable run.dir": (["--set", "run.dir=text.txt/below"], ["run.dir", "text.txt", "not a directory"]),
    "a name that is too long": (
        ["--set", f"run.dir={'x' * 300}"],
        ["xxx: File name too long; choose another run.dir"],
    ),
    "unknown option": (["--nonsense"], ["--nonsense"]),
}


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """{case: how it ended}, and whether nothing was written."""
    usual = tiny("runs/mine", "text.txt", run_steps=1)
    done, clean = all_refused(
        tmp_path_factory.mktemp("two"), 2, [("run", *usual, *given) for given, _ in CASES.values()]
    )
    return dict(zip(CASES, done, strict=True)), clean


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_refuse_alike(on_two_ranks, case):
    done, clean = on_two_ranks
    require_refused(done[case], CASES[case][1])
    assert clean


@pytest.mark.parametrize("case", ["layout", "empty data"])
def test_two_ranks_that_refuse_end_the_job(folder, case):
    """As a user starts it: ranks that MPI has not connected yet, or has, leave with the message and
    the exit code.
    """
    given, words = CASES[case]
    refused(folder, 2, words, MPITRAIN, "run", *tiny("runs/mine", "text.txt", run_steps=1), *given)


def test_run_directory_of_another_config(folder):
    first = run_tiny(1, folder / "mine", folder / "text.txt", run_steps=1)
    assert first.returncode == 0, tail(first.output)
    given = tiny("mine", "text.txt", run_steps=1, model_width=64)
    refused(folder, 2, ["run.dir = mine", "model.width = 32", "64"], MPITRAIN, "run", *given)


@pytest.mark.parametrize(("name", "size"), [("OMPI_COMM_WORLD_SIZE", "2"), ("PMI_SIZE", "3")])
def test_a_process_with_the_variables_of_a_rank_that_is_none(folder, name, size):
    """It believes to be rank 0 of 1, and would train alone, as would its neighbours."""
    given = tiny("runs/mine", "text.txt", run_steps=1)
    words = [f"started {size} ranks", name, "is none of them", f"env -u {name} mpitrain"]
    refused(folder, 0, words, MPITRAIN, "run", *given, env={name: size})


def test_a_process_in_an_allocation_of_several_tasks_is_alone(folder):
    """sbatch and salloc set SLURM_NTASKS and start one process.

    srun, which starts the tasks, sets SLURM_STEP_ID besides.
    """
    done = mpirun(
        0, MPITRAIN, "run", *tiny("runs/mine", "text.txt", run_steps=1), env={"SLURM_NTASKS": "4"}, cwd=folder
    )
    assert done.returncode == 0 and "done: 1 step," in done.output, tail(done.output)


# ---------------------------- configurations that nothing accepts; `check` reads them as `run` does


IMPOSSIBLE = [
    (["absent.toml"], ["absent.toml", "No such file"]),
    (["folder.toml"], ["folder.toml", "directory"]),
    (["binary.toml"], ["binary.toml", "UTF-8"]),
    (["loop.toml"], ["base leads back to itself"]),
    (["number.toml"], ["base", "3"]),
    (["flat.toml"], ["run", "expected a table"]),
    (["--set", "run.steps"], ["key=value"]),
    (["--set", "=3"], ["key=value"]),
    (["--set", "run..steps=3"], ["key=value"]),
    (["--set", "run=3"], ["run", "expected a table"]),
    (["--set", "run.steps.more=3"], ["run.steps"]),
    (["--set", "run.schritte\u00e4=3"], ["run.schritte\u00e4"]),
    (["--set", "run.steps="], ["run.steps", "int"]),
    (["--set", "run.steps=0"], ["run.steps", ">= 1"]),
    (["--set", "run.steps=-3"], ["run.steps", ">= 1"]),
    (["--set", "run.steps=2.5"], ["run.steps", "int"]),
    (["--set", "run.steps=true"], ["run.steps", "int"]),
    (["--set", "run.seed=100000000000000000000000"], ["run.seed"]),
    (["--set", "optimizer.lr=nan"], ["optimizer.lr"]),
    (["--set", "optimizer.lr=inf"], ["optimizer.lr", "finite"]),
    (["--set", "optimizer.lr=-1.0"], ["optimizer.lr"]),
    (["--set", "optimizer.betas=[0.9]"], ["optimizer.betas"]),
    (["--set", "data.val_fraction=1.0"], ["data.val_fraction"]),
    (["--set", "model.heads=3"], ["model.width", "model.heads = 3"]),
    (["--set", "model.vocab=10"], ["model.vocab = 10"]),
    (["--set", "model.preset=quikstart"], ["quikstart", "did you mean quickstart?"]),
    (["--set", "pipeline.schedule=2f2b"], ["2f2b"]),
    (["--set", "pipeline.stages=[6,6]"], ["pipeline.stages", "model.layers = 6"]),
    (["--set", "data.tokenizer=absent.json"], ["absent.json"]),
    (["--ranks", "0"], ["--ranks"]),
    (["--set", "precision.compute=fp31"], ["precision.compute", "'fp31'", "needed one of", "bf16"]),
    (["--set", "run.compile=False"], ["run.compile", "'False'", "needed one of auto, true, false"]),
    (["--set", "optimizer.name=Adam"], ["optimizer.name", "'Adam'", "known: adamw, muon, sgd"]),
    (["--set", "run.steps=abc"], ["run.steps", "expected `int`, got `str`", "'abc'"]),
    (
        ["--set", "pipeline.times=1,1,1,0"],
        ["pipeline.times", "expected `array`, got `str`", "'1,1,1,0'; write [1, 1, 1, 0]"],
    ),
    (["unknown.toml"], ["unknown key run.step in unknown.toml; did you mean run.steps?"]),
    (["derived.toml"], ["nosuch.toml, the base of derived.toml: No such file"]),
    (["--ranks", "2", "--set", "parallel.tp=3"], ["parallel.tp = 3", "but there are 2 ranks"]),
    (["--ranks", "2", "--set", "parallel.dp=3"], ["= 3 ranks, but there are 2;"]),
]


@pytest.fixture(scope="module")
def impossible(tmp_path_factory):
    """How `check` ended on each, and whether nothing was written."""
    return all_refused(
        tmp_path_factory.mktemp("impossible"), 0, [("check", *given) for given, _ in IMPOSSIBLE]
    )


@pytest.mark.parametrize(
    "number",
    range(len(IMPOSSIBLE)),
    ids=lambda number: "-".join(IMPOSSIBLE[number][0]).removeprefix("--set-"),
)
def test_impossible_configuration(impossible, number):
    done, clean = impossible
    require_refused(done[number], IMPOSSIBLE[number][1])
    assert clean


def test_a_first_rank_that_is_late_still_says_what_is_wrong(folder):
    """Open MPI's launcher ends the job when another rank fails first."""
    late = 'test "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 0 && sleep 1; exec "$0" "$@"'
    refused(folder, 2, ["--nonsense"], "sh", "-c", late, MPITRAIN, "run", "--nonsense")


def test_impossible_run_directory_name(folder):
    refused(folder, 0, ["run.dir"], MPITRAIN, "run", *options({"run.dir": "x" * 300}))


# --------------------------------------------------------------- what goes wrong later, on one rank


def limit_files(job, rank, size):
    """Let no file of this rank grow beyond `size`.

    What a write needs then is the same error as a full disk, on one rank only.
    """
    resource.prlimit(job.ranks()[rank], resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize(("phase", "code"), [("build", BAD_INPUT), ("save", FAILED)])
def test_what_one_rank_refuses_is_bad_input_until_steps_begin(monkeypatch, phase, code):
    guard = Guard.__new__(Guard)
    ended = []
    guard.place = RankStatus(1, "rank 1 of 2")
    guard.watchdog = WatchdogClient(guard.place)
    guard.place.enter(phase, "reading")
    monkeypatch.setattr(guard.watchdog, "end_job", lambda *report_and_code: ended.append(report_and_code))
    monkeypatch.setattr("mpitrain.cluster.guard.abort", lambda code: None)
    guard.fail(DataError("text.txt is gone"))
    assert ended == [
        (f"mpitrain: rank 1 of 2 failed in phase {phase}, reading: DataError: text.txt is gone", code)
    ]


@LONG
def test_a_rank_that_cannot_write_a_line_of_metrics_keeps_it_until_it_can(tmp_path):
    """A shard that can't be written ends nothing either: tests/runs/test_run_saving.py."""
    text = write_text(tmp_path / "text.txt")
    run_dir = tmp_path / "run"
    with started(
        2, MPITRAIN, "run", *tiny(run_dir, text, parallel_pp=2, run_steps=60, run_eval_every=20)
    ) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 3, 60)
        limit_files(job, 0, 100)
        job.wait_for(lambda: "its lines are kept" in job.text(), 60)
        limit_files(job, 0, resource.RLIM_INFINITY)
        done = job.wait(90)
    assert done.returncode == 0, tail(done.output)
    assert re.search(
        r"metrics.jsonl can't be written: File too large; .*\n(.*\n)*.*metrics.jsonl has all lines again",
        done.output,
    )
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(61))

"""`mpitrain supervise`: ranks are killed with -9 at any moment, and the run ends as if nothing had been.

Copies in memory (recovery.every) are made after every step, checkpoints on disk every fifth one.
MPITRAIN_EFFORT=200 kills as often, over all layouts; by default a few.
"""

import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import digest_of
from effort import WITH_LONG, numbers
from hosts import CHOSEN, two_hosts
from launch import (
    MPIRUN,
    MPITRAIN,
    finished,
    lines_in,
    loss_lines,
    mpirun,
    patience,
    preloaded,
    run_tiny,
    started,
    tail,
    tiny,
    write_text,
)
from undisturbed import undisturbed_runs

from mpitrain.checkpoint.folders import TMP
from mpitrain.checkpoint.load import steps
from mpitrain.cluster.rundir import RunDir
from mpitrain.plan.predict.snapshot_bytes import MARKS, META_BYTES
from mpitrain.training.saving.memory_folder import memory_folders, named_folder, newest_step_in_memory

KILLS = numbers(range(0 if WITH_LONG else 1, 2), 200)
STEPS = 16
SAVE_EVERY = 5
WITHOUT = dict(run_steps=STEPS, run_save_every=SAVE_EVERY, run_eval_every=6)
SETTINGS = WITHOUT | dict(recovery_every=1)
LAYOUTS = [
    (2, dict(parallel_dp=2, parallel_zero=1)),
    (4, dict(parallel_pp=2, parallel_tp=2, pipeline_schedule="zbv", pipeline_chunks=2)),
    (2, dict(parallel_dp=2, parallel_zero=3)),
    (4, dict(parallel_dp=4, parallel_zero=2, parallel_dp_shard=2)),
    (2, dict(parallel_pp=2, pipeline_schedule="1f1b")),
    (2, dict(parallel_cp=2)),
    (4, dict(parallel_dp=2, parallel_tp=2, parallel_zero=1)),
    (2, dict(parallel_ep=2, parallel_dp=2, model_family="mixtral", model_layers=2, experts_count=4)),
    (4, dict(parallel_dp=4, parallel_zero=1, comm_node_ranks=1)),
    (4, dict(parallel_dp=2, parallel_pp=2, parallel_zero=3, comm_node_ranks=2)),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("supervised") / "text.txt", 20_000)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, text):
    return undisturbed_runs(tmp_path_factory.mktemp("whole"), text, LAYOUTS, SETTINGS)


def supervised(num_ranks, run_dir, text, settings, *, most=1000):
    """Return the command that supervises a run."""
    run = preloaded([MPITRAIN, "run", *tiny(run_dir, text, **settings)])
    return [MPITRAIN, "supervise", "--most", str(most), MPIRUN, "-n", str(num_ranks), *run]


def wait_for_step(job, run_dir, step):
    job.wait_for(lambda: has_ended(job) or lines_in(run_dir) >= step, 60)


def has_ended(job):
    return job.process.poll() is not None


def wait_for_moment(job, run_dir, dice):
    """Wait for a moment of a step, of a save on disk, or of a start that has no rank in a step yet."""
    moment = dice.choice(["step", "step", "save", "start"])
    if moment == "save":
        last = lines_in(run_dir) + SAVE_EVERY
        job.wait_for(
            lambda: has_ended(job) or lines_in(run_dir) > min(last, STEPS - 2) or is_saving(run_dir), 60
        )
    if moment == "step":
        wait_for_step(job, run_dir, dice.randrange(1, STEPS - 2))
        time.sleep(dice.expovariate(5))
    if moment == "start":
        time.sleep(dice.random())


def is_saving(run_dir):
    """Return whether a checkpoint is being written, which is renamed when it is whole."""
    return any(run_dir.glob(f"checkpoints/*{TMP}"))


def kill_some(job, dice, run_dir, node_ranks):
    """Kill a rank, two, mpirun, or an emulated node, once there is one; what ends just now is let go."""
    of_launcher = dice.random() < 0.2

    def victims():
        with suppress(OSError):  # one ended while it was looked at
            return children(job.process.pid) if of_launcher else set(job.ranks()) - {job.process.pid}
        return set()

    job.wait_for(lambda: has_ended(job) or victims(), 60)
    num_nodes = len(job.ranks()) // node_ranks if node_ranks else 0  # 0 also while ranks start
    if num_nodes and named_folder(RunDir(run_dir)) and dice.random() < 0.5:
        lose_nodes(job, run_dir, node_ranks, [dice.randrange(num_nodes)])
        return
    some = [] if has_ended(job) else sorted(victims())
    for pid in dice.sample(some, min(dice.choice([1, 1, 2]), len(some))):
        with suppress(ProcessLookupError, AssertionError):
            job.signal(pid, signal.SIGKILL)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", KILLS)
def test_a_killed_run_ends_as_one_that_nobody_disturbed(tmp_path, text, undisturbed, number):
    dice = random.Random(f"supervise {number}")
    which = number % len(LAYOUTS)
    num_ranks, layout = LAYOUTS[which]
    settings = SETTINGS | layout
    whole = undisturbed(which)
    run_dir = tmp_path / "run"
    # a supervisor that is no fork is none of the ranks
    with started(0, *supervised(num_ranks, run_dir, text, settings), forked=False) as job:
        for _ in range(2):
            wait_for_moment(job, run_dir, dice)
            kill_some(job, dice, run_dir, settings.get("comm_node_ranks", 0))
        done = job.wait(120)
    assert done.returncode == 0, tail(done.output)
    assert loss_lines(run_dir) == loss_lines(whole), tail(done.output)
    assert digest_of(run_dir / "checkpoints", STEPS) == digest_of(whole / "checkpoints", STEPS)
    assert not RunDir(run_dir).recovery.exists() and "done" in done.output.splitlines()[-1]


NODES = [
    (2, 1, dict(parallel_dp=2, parallel_zero=1)),
    (4, 2, dict(parallel_pp=2, parallel_tp=2, pipeline_schedule="zbv", pipeline_chunks=2)),
    (4, 2, dict(parallel_dp=4, parallel_zero=2, parallel_dp_shard=2)),
    (4, 1, dict(parallel_dp=2, parallel_zero=3, parallel_pp=2)),
    (4, 2, dict(parallel_ep=2, parallel_dp=4, model_family="mixtral", model_layers=2, experts_count=4)),
    (3, 1, dict(parallel_pp=3, model_layers=6)),
]


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(("num_ranks", "node_ranks", "layout"), NODES)
def test_a_lost_node_is_restored_from_its_partner(tmp_path, text, num_ranks, node_ranks, layout):
    """All ranks of a node are killed and its memory is gone; no checkpoint is on disk yet."""
    settings = SETTINGS | layout | dict(comm_node_ranks=node_ranks, run_save_every=0)
    whole = run_tiny(num_ranks, tmp_path / "whole", text, **settings)
    assert whole.returncode == 0, tail(whole.output)
    run_dir = tmp_path / "run"
    with started(0, *supervised(num_ranks, run_dir, text, settings), forked=False) as job:
        wait_for_step(job, run_dir, 5)
        lose_nodes(job, run_dir, node_ranks, [1])
        done = job.wait(120)
    assert done.returncode == 0 and "resuming after step" in done.output, tail(done.output)
    assert loss_lines(run_dir) == loss_lines(tmp_path / "whole"), tail(done.output)
    assert digest_of(run_dir / "checkpoints", STEPS) == digest_of(tmp_path / "whole/checkpoints", STEPS)


def lose_nodes(job, run_dir, node_ranks, nodes):
    """Kill all ranks of some nodes and remove their folders."""
    folder = named_folder(RunDir(run_dir))
    ranks = [pid for pid in job.ranks() if pid != job.process.pid]
    for node in nodes:
        first = node * node_ranks
        for pid in ranks[first : first + node_ranks]:
            with suppress(ProcessLookupError, AssertionError):
                job.signal(pid, signal.SIGKILL)
    for node in nodes:
        first = node * node_ranks
        name = f"{folder.name}.{first}" if first else folder.name
        subprocess.run(["rm", "-rf", str(folder.with_name(name))], check=True)


@pytest.mark.skipif(not CHOSEN, reason="MPITRAIN_NETNS=1 makes two hosts of network namespaces")
def test_a_lost_host_is_restored_from_its_partner(tmp_path, text):
    """Two network namespaces, which MPI takes for two nodes."""
    run_dir = tmp_path / "run"
    settings = SETTINGS | dict(parallel_dp=2, parallel_zero=1, run_save_every=0)
    whole = run_tiny(2, tmp_path / "whole", text, **settings)
    with two_hosts(tmp_path) as hosts:
        command = hosts.mpirun(1, MPITRAIN, "run", *tiny(run_dir, text, **settings))
        with started(0, *command, forked=False) as job:
            wait_for_step(job, run_dir, 5)
            lost = [pid for pid in job.ranks() if str(run_dir) in cmdline(pid)][-1]
            job.signal(lost, signal.SIGKILL)
            job.wait(60)
        folder = named_folder(RunDir(run_dir))
        subprocess.run(["rm", "-rf", str(hosts.memory[1] / f"{folder.name}.1")], check=True)
        with started(0, *command, forked=False) as job:
            done = job.wait(60)
    assert done.returncode == whole.returncode == 0, tail(done.output)
    assert f"of {folder}" in done.output and loss_lines(run_dir) == loss_lines(tmp_path / "whole")


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_partners_that_die_together_leave_the_checkpoint(tmp_path, text):
    run_dir = tmp_path / "run"
    settings = SETTINGS | dict(parallel_pp=3, model_layers=3, comm_node_ranks=1)
    whole = run_tiny(3, tmp_path / "whole", text, **settings)
    with started(3, MPITRAIN, "run", *tiny(run_dir, text, **settings)) as job:
        job.wait_for(lambda: steps(run_dir / "checkpoints"), 60)
        wait_for_step(job, run_dir, lines_in(run_dir) + 2)
        lose_nodes(job, run_dir, 1, [1, 2])
        job.wait(60)
    saved = max(steps(run_dir / "checkpoints"))
    done = run_tiny(3, run_dir, text, **settings)
    assert done.returncode == whole.returncode == 0, tail(done.output)
    assert "of the state: the nodes that had it are gone" in done.output, tail(done.output)
    assert f"resuming after step {saved} of {run_dir}/checkpoints" in done.output, tail(done.output)
    assert loss_lines(run_dir) == loss_lines(tmp_path / "whole")


def test_what_is_lost_is_the_step_under_way(tmp_path, text):
    """No checkpoint on disk is there yet, and a start resumes after the step that all had done."""
    run_dir = tmp_path / "run"
    settings = SETTINGS | dict(run_save_every=0)
    with started(2, MPITRAIN, "run", *tiny(run_dir, text, **settings, parallel_dp=2)) as job:
        wait_for_step(job, run_dir, 5)
        job.signal(job.ranks()[1], signal.SIGKILL)
        job.wait(60)
    step = newest_step_in_memory(RunDir(run_dir))
    assert step in (lines_in(run_dir) - 1, lines_in(run_dir)) and not steps(run_dir / "checkpoints")
    (folder,) = memory_folders(RunDir(run_dir))
    done = run_tiny(4, run_dir, text, **settings, parallel_pp=2, parallel_dp=2)  # in another layout
    assert done.returncode == 0 and f"resuming after step {step} of {folder}" in done.output, tail(
        done.output
    )
    assert not folder.exists()


ELSEWHERE = 'mv "$0.elsewhere" "$0"; "$@"; code=$?; mv "$0" "$0.elsewhere"; exit $code'


def test_a_run_whose_copies_are_on_other_nodes_alone_is_not_given_up(tmp_path, text):
    """The folder of the copies is there while ranks run, and not when starts are counted."""
    run_dir, memory = tmp_path / "run", tmp_path / "memory"
    (tmp_path / "memory.elsewhere").mkdir()
    settings = SETTINGS | dict(run_save_every=0, parallel_dp=2, recovery_folder=memory)
    command = supervised(2, run_dir, text, settings)
    supervise, start = command[:4], command[4:]
    whole = run_tiny(2, tmp_path / "whole", text, **settings | dict(recovery_every=0))
    with started(0, *supervise, "sh", "-c", ELSEWHERE, memory, *start, forked=False) as job:
        for step in (3, 6, 9, 12):  # more starts than may follow one another without progress
            wait_for_step(job, run_dir, step)
            with suppress(ProcessLookupError, AssertionError):
                job.signal(max(job.ranks()), signal.SIGKILL)
        done = job.wait(120)
    assert done.returncode == whole.returncode == 0, tail(done.output)
    assert "was in memory when it was started: again, start 5" in done.output, tail(done.output)
    assert loss_lines(run_dir) == loss_lines(tmp_path / "whole")


def test_a_step_that_is_saved_is_copied_too(tmp_path, text):
    """Its checkpoint is committed some steps later."""
    run_dir = tmp_path / "run"
    settings = SETTINGS | dict(run_save_every=4, recovery_every=4)
    with started(1, MPITRAIN, "run", *tiny(run_dir, text, **settings)) as job:
        wait_for_step(job, run_dir, 5)
        for pid in job.ranks():  # not job.kill(), which removes what it has mapped
            job.signal(pid, signal.SIGKILL)
        job.wait(60)
    assert newest_step_in_memory(RunDir(run_dir)) in (4, 8)
    shutil.rmtree(named_folder(RunDir(run_dir)))


CHANGED = {"torn": 0, "meta": MARKS, "a bit": MARKS + META_BYTES + 1000}  # the byte of each copy


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    "change", ["older", "moved", "a link", "of another run", "torn", "cut", "meta", "manifest", "a bit"]
)
def test_what_is_not_this_run_s_is_not_read(tmp_path, text, change):
    run_dir = tmp_path / "run"
    with started(1, MPITRAIN, "run", *tiny(run_dir, text, **SETTINGS)) as job:
        wait_for_step(job, run_dir, 3)
        for pid in job.ranks():  # not job.kill(), which removes what it has mapped
            job.signal(pid, signal.SIGKILL)
        job.wait(60)
    rundir = RunDir(run_dir)
    (folder,) = memory_folders(rundir)
    assert newest_step_in_memory(rundir) >= 2
    try:
        (binary,) = folder.glob("copies-*/shard-0.bin")
        if change == "moved":
            run_dir = run_dir.rename(tmp_path / "other")
        elif change == "a link":
            named = folder.with_name(f"mpitrain-{os.getpid()}")
            named.symlink_to(folder)
            rundir.recovery.write_text(json.dumps({"folder": str(named)}))
        elif change == "older":  # a run begins anew where another one was, of which this file was kept
            kept = rundir.recovery.read_bytes()
            shutil.rmtree(run_dir)
            run_dir.mkdir()
            rundir.recovery.write_bytes(kept)
        elif change == "of another run":
            (folder / "run").write_text(str(tmp_path))
        elif change == "manifest":  # where an array lies in a copy
            path = binary.with_suffix(".json")
            path.write_text(re.sub(r'"at":(\d+)', '"at":0', path.read_text(), count=2))
        elif change in CHANGED:
            content = bytearray(binary.read_bytes())
            for copy in (0, len(content) // 2):
                content[copy + CHANGED[change]] ^= 1
            binary.write_bytes(content)
        else:
            os.truncate(binary, 1000)
        # the digest of all bytes is compared where they are read
        assert change in ("a bit", "older") or newest_step_in_memory(RunDir(run_dir)) == 0
        done = run_tiny(1, run_dir, text, **SETTINGS)
        assert done.returncode == 0 and "resuming" not in done.output, tail(done.output)
        assert ("has another digest than it was made with" in done.output) == (change == "a bit")
    finally:
        for path in folder.parent.glob(f"mpitrain-{os.getpid()}"):
            path.unlink()
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def test_a_folder_that_was_being_made_or_removed_is_finished_and_any_path_of_a_run_is_its_own(tmp_path, text):
    """Node 1 was killed when its folder had no name of a run yet, or no more. A link leads to the run."""
    run_dir = tmp_path / "run"
    settings = SETTINGS | LAYOUTS[0][1] | dict(comm_node_ranks=1, run_save_every=0)
    with started(2, MPITRAIN, "run", *tiny(run_dir, text, **settings)) as job:
        wait_for_step(job, run_dir, 4)
        for pid in job.ranks():  # not job.kill(), which removes what it has mapped
            job.signal(pid, signal.SIGKILL)
        job.wait(60)
    folders = memory_folders(RunDir(run_dir))
    (folders[1] / "run").unlink()
    (tmp_path / "link").symlink_to(tmp_path)
    done = run_tiny(2, tmp_path / "link/run", text, **settings)
    assert done.returncode == 0 and f"of {folders[0]}" in done.output, tail(done.output)
    assert not any(folder.exists() for folder in folders)


def test_asked_to_leave_while_it_resumes_from_memory_a_run_saves_a_step_first(tmp_path, text):
    """Memory of its nodes may be gone with the job, and nothing is on disk."""
    run_dir = tmp_path / "run"
    given = tiny(run_dir, text, **SETTINGS | dict(run_save_every=0, run_steps=1000))
    with started(1, MPITRAIN, "run", *given) as job:
        wait_for_step(job, run_dir, 4)
        for pid in job.ranks():
            job.signal(pid, signal.SIGKILL)
        job.wait(60)
    copied = newest_step_in_memory(RunDir(run_dir))
    lock = (run_dir / "run.lock").read_bytes()
    with started(1, MPITRAIN, "run", *given) as job:
        job.wait_for(lambda: (run_dir / "run.lock").read_bytes() != lock, 60)
        job.signal(job.ranks()[0], signal.SIGUSR1)
        done = job.wait(60)
    assert done.returncode == 75, tail(done.output)
    assert max(steps(run_dir / "checkpoints")) > copied >= 3, tail(done.output)


def whole_copies(binary):
    """Return the bytes of a file of copies, and where the copy of each step begins."""
    content = bytearray(binary.read_bytes())
    marks = {at: struct.unpack_from("<2q", content, at) for at in (0, len(content) // 2)}
    return content, {first: at for at, (first, second) in marks.items() if first == second > 0}


@pytest.mark.parametrize(
    ("nodes", "num_damaged"), [((0,), 2), ((0, 1), 1), ((0, 1), 2)], ids=["own", "newest", "all"]
)
def test_instead_of_a_damaged_copy_the_partner_s_is_used_or_the_one_before(
    tmp_path, text, nodes, num_damaged
):
    """num_damaged: of the newest copies of shard 0, on each of some nodes."""
    run_dir = tmp_path / "run"
    settings = SETTINGS | LAYOUTS[0][1] | dict(comm_node_ranks=1, run_save_every=0)
    whole = run_tiny(2, tmp_path / "whole", text, **settings)
    with started(2, MPITRAIN, "run", *tiny(run_dir, text, **settings)) as job:
        wait_for_step(job, run_dir, 5)
        for pid in job.ranks():  # not job.kill(), which removes what it has mapped
            job.signal(pid, signal.SIGKILL)
        job.wait(60)
    there = {0: set(), 1: set()}  # of each shard: steps of which some node has a good copy
    for node, folder in enumerate(memory_folders(RunDir(run_dir))):
        for shard, steps_there in there.items():
            (binary,) = folder.glob(f"copies-*/shard-{shard}.bin")
            content, begins = whole_copies(binary)
            for step in sorted(begins)[-num_damaged:] if shard == 0 and node in nodes else ():
                content[begins.pop(step) + MARKS + META_BYTES + 1000] ^= 1
            binary.write_bytes(content)
            steps_there |= set(begins)
    step = max(there[0] & there[1], default=0)
    done = run_tiny(2, run_dir, text, **settings)
    assert done.returncode == whole.returncode == 0, tail(done.output)
    assert "part 0 of step" in done.output and "has another digest than it was made" in done.output
    assert (f"resuming after step {step} of " in done.output) == bool(step), tail(done.output)
    assert loss_lines(run_dir) == loss_lines(tmp_path / "whole"), tail(done.output)


def test_a_node_without_room_for_a_checkpoint_in_memory_keeps_nothing_of_it(tmp_path, text):
    """Node 1 is new and its files can't grow; node 0 has what an earlier start made."""
    run_dir = tmp_path / "run"
    settings = SETTINGS | LAYOUTS[0][1] | dict(comm_node_ranks=1, run_save_every=0, run_steps=1000)
    settings |= dict(model_width=384, model_layers=3)  # a shard is larger than what MPI's files may take
    for every, is_reached in (
        (1, lambda text: lines_in(run_dir) >= 6),
        (10_000, lambda text: "resuming after step" in text),
    ):
        given = tiny(run_dir, text, **settings | dict(recovery_every=every))
        with started(2, MPITRAIN, "run", *given) as job:
            job.wait_for(lambda is_reached=is_reached: is_reached(job.text()), 60)
            for pid in job.ranks():  # not job.kill(), which removes what it has mapped
                job.signal(pid, signal.SIGKILL)
            job.wait(60)
    folders = memory_folders(RunDir(run_dir))
    assert [len(list(folder.glob("step-*"))) for folder in folders] == [1, 1]
    subprocess.run(["rm", "-rf", folders[1]], check=True)
    limited = ["sh", "-c", 'test "$PMI_RANK" = 0 || ulimit -f 9216; exec "$@"', "sh"]
    with started(2, *limited, MPITRAIN, "run", *given, forked=False) as job:
        job.wait_for(lambda: "training on" in job.text() and lines_in(run_dir) == 2, 60)
        assert not list(folders[1].glob("step-*")), tail(job.text())
        done = job.text()
    assert "not from memory: " in done and "File too large" in done, tail(done)
    subprocess.run(["rm", "-rf", *folders], check=True)


def test_where_memory_has_no_room_the_run_has_no_copies(tmp_path, text):
    """Two copies are larger than one file of a checkpoint: a limit of a file's size lies between."""
    settings = WITHOUT | dict(model_width=128, model_heads=4, run_steps=4)
    whole = run_tiny(1, tmp_path / "whole", text, **settings)
    (shard,) = (tmp_path / "whole/checkpoints/step-00000004").glob("shard-*.h5")
    small = tmp_path / "small"
    small.mkdir()
    code = "import os, resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)"
    limited = [
        sys.executable,
        "-c",
        f"{code}; os.execv(sys.argv[2], sys.argv[2:])",
        str(int(1.5 * shard.stat().st_size)),
    ]
    run = [
        MPITRAIN,
        "run",
        *tiny(tmp_path / "run", text, **settings, recovery_every=1, recovery_folder=small),
    ]
    done = mpirun(1, *limited, *run)
    assert whole.returncode == done.returncode == 0, tail(done.output)
    assert done.output.count("no copies in memory (recovery.every)") == 1, tail(done.output)
    assert loss_lines(tmp_path / "run") == loss_lines(tmp_path / "whole") and not list(small.iterdir())


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["true"], "COMMAND = true: needed one with mpitrain run"),
        (["mpirun", "-n", "2", MPITRAIN, "run", "--no-such"], "No such option"),
        (["no-such-launcher", MPITRAIN, "run"], "no-such-launcher: No such file or directory"),
        ([MPITRAIN, "run", "--set", "run.steps=0"], "run.steps"),
        (
            [MPITRAIN, "run", "--set", "recovery.folder=/nowhere", "--set", "recovery.every=1"],
            "recovery.folder",
        ),
    ],
)
def test_what_can_not_work_is_not_tried_again(tmp_path, words, said):
    done = mpirun(0, MPITRAIN, "supervise", *words, cwd=tmp_path)
    assert done.returncode == 2 and done.output.count(said) == 1, done.output


BETWEEN = """
import os, signal, sys
from mpitrain.commands.job import again, supervise

def judge(*asked):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return again.AGAIN, "again"

again.main = judge
sys.exit(supervise.main(["sh", "-c", "echo started; exit 9"], None, (), 5, print))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_asked_to_leave_between_two_starts_it_starts_no_more(name):
    done = finished([sys.executable, "-c", BETWEEN, name], capture_output=True, text=True)
    assert done.returncode == 9, done.stdout + done.stderr
    assert done.stdout.count("started") == 1 and f"({name}): not again" in done.stdout


def test_a_supervisor_that_is_killed_leaves_nothing_running(tmp_path, text):
    run_dir = tmp_path / "run"
    (tmp_path / "memory").mkdir()
    settings = SETTINGS | dict(run_steps=100_000, recovery_folder=tmp_path / "memory")
    with started(0, *supervised(2, run_dir, text, settings), forked=False) as job:
        wait_for_step(job, run_dir, 3)
        job.signal(job.process.pid, signal.SIGKILL)
        job.process.wait()
        end = time.monotonic() + patience(30)
        while (left := job.ranks()) and time.monotonic() < end:
            time.sleep(0.1)
        said = job.text()
    assert not left, tail(said)


def test_asked_to_leave_it_is_not_started_again(tmp_path, text):
    run_dir = tmp_path / "run"
    with started(0, *supervised(2, run_dir, text, SETTINGS | dict(run_steps=1000))) as job:
        wait_for_step(job, run_dir, 3)
        job.signal(job.process.pid, signal.SIGUSR1)  # Open MPI kills its ranks after SIGTERM
        done = job.wait(60)
    assert "start 2" not in done.output and steps(run_dir / "checkpoints"), tail(done.output)

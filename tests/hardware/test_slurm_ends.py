"""Under a real Slurm, with each of its trackers and each launcher.

However a job ends, no process of it is left, and it restarts or not.

MPITRAIN_SLURM=N, as root, with Debian's slurm-wlm and munge: N jobs for each tracker and launcher,
each of which ends in six ways.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from launch import HERE, lines_in, planted
from slurm import ENDED, TRACKERS, Slurm, Training, missing, slurm

ASKED = os.environ.get("MPITRAIN_SLURM", "")
pytestmark = pytest.mark.skipif(not ASKED.isdecimal(), reason="MPITRAIN_SLURM=1 starts a Slurm")
MPICH = (HERE / "mpichversion").exists()
LAUNCHERS = ["srun --mpi=pmi2", "mpirun -n 2"] if MPICH else ["mpirun -n 2"]  # as in test_slurm.py
COUNT = int(ASKED) if ASKED.isdecimal() else 0
AT_ONCE = 4  # jobs of two ranks
KILL_WAIT_S = 10
GONE_S = 60
SLOW_S = 400  # for a job to start, where all do at once
# of an allocation; the run leaves after 130 s
MINUTES = 5
MARGIN_S = 170
# the other tests end jobs that take steps
PHASES = ("start", "tokens", "build", "resume", "validation")
EARLY_MARGIN_S = 80  # of two minutes


@pytest.fixture(scope="module", params=TRACKERS)
def cluster(request, tmp_path_factory) -> Iterator[Slurm]:
    if missing():
        pytest.fail(missing())
    with slurm(
        tmp_path_factory.mktemp("slurm"),
        request.param,
        cpus=2 * max(AT_ONCE, len(PHASES)),
        kill_wait=KILL_WAIT_S,
    ) as found:
        yield found


@pytest.fixture(params=LAUNCHERS)
def groups(request, cluster, tmp_path) -> Iterator[Callable[..., Iterator[list[Training]]]]:
    """Yield what submits jobs, some at once, and gives each list of them when all take steps.

    No job outlives the test.
    """
    every = []

    def submitted(minutes: int, **changes: object) -> Iterator[list[Training]]:
        for first in range(0, COUNT, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, COUNT))
            found = [
                Training(cluster, tmp_path / str(number), request.param, minutes, **changes)
                for number in numbers
            ]
            every.extend(found)
            for training in found:
                training.wait_for_start(1, SLOW_S)
            yield found

    yield submitted
    for training in every:
        cluster.cancel(training.job)


@contextmanager
def kept_stopped(pids: list[int]) -> Iterator[None]:
    """Stop processes again and again: SIGCONT comes with each SIGTERM of Slurm's."""
    over = threading.Event()

    def stop() -> None:
        while not over.wait(0.02):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def processes_of(trainings: list[Training]) -> list[dict[int, str]]:
    return [training.cluster.processes(training.job) for training in trainings]


def no_process_left(cluster: Slurm, job: str, before: dict[int, str]) -> None:
    """Wait until none of the processes that a job had is there."""

    def left() -> dict[int, str]:
        births = {(pid, name.partition(", ")[2]) for pid, name in before.items()}
        return {
            pid: name
            for pid, name in cluster.processes(job).items()
            if (pid, name.partition(", ")[2]) in births
        }

    cluster.wait_for(
        f"the end of all processes of job {job}", lambda: not left(), GONE_S, lambda: f"left: {left()}"
    )


def ended(training: Training, state: str, before: dict[int, str]) -> None:
    """Wait until a job is over for good, and hold what is left of it against what should be."""
    cluster = training.cluster
    job = training.job
    cluster.wait_for(f"{state} of job {job}", lambda: cluster.state(job) in ENDED, SLOW_S, training.console)
    assert cluster.state(job) == state, training.console()
    no_process_left(cluster, job, before)
    assert not cluster.processes(job), cluster.processes(job)


def await_requeue(trainings: list[Training], before: list[dict[int, str]], starts: int, noted: int) -> None:
    """Wait until jobs have been requeued and run.

    Nothing of their last start was left, or its lock would keep them out.

    From then on they have time.
    noted: ends that are noted for sure; Slurm may kill a script before it notes another one.
    """
    for training, processes in zip(trainings, before, strict=True):
        training.wait_for_restart(starts - 1, SLOW_S)
        training.cluster.run("scontrol", "update", f"jobid={training.job}", "timelimit=50")
        no_process_left(training.cluster, training.job, processes)
    for training in trainings:
        training.wait_for_start(starts, SLOW_S)
        ends = training.ends()
        assert noted <= len(ends) < starts and all(end["code"] == 75 for end in ends), (
            f"{ends}\n{training.console()}"
        )
        assert "resuming after step" in training.console() and "is in use by" not in training.console(), (
            training.console()
        )


def test_a_job_that_is_signalled_or_loses_its_node_restarts_and_one_that_is_cancelled_doesnt(
    cluster, groups, request
):
    by_shell = ["--batch"] * ("mpirun" in request.node.callspec.params["groups"])
    node = f"nodename={os.uname().nodename}"
    for trainings in groups(minutes=50):
        before = processes_of(trainings)
        for training in trainings:
            cluster.run("scancel", "--signal=USR1", *by_shell, training.job)
        await_requeue(trainings, before, starts=2, noted=1)

        before = processes_of(trainings)
        cluster.run("scontrol", "update", node, "state=down", "reason=test")
        for training, processes in zip(trainings, before, strict=True):
            no_process_left(cluster, training.job, processes)
        cluster.resume_node([training.job for training in trainings])
        await_requeue(trainings, before, starts=3, noted=1)

        before = processes_of(trainings)
        (daemon,) = cluster.daemons.values()
        daemon.kill()  # the daemon alone: it restarts when the node was given up
        daemon.wait()
        cluster.node_is("down", 180)
        cluster.start_nodes()
        await_requeue(trainings, before, starts=4, noted=1)

        before = processes_of(trainings)
        for training in trainings:
            cluster.run("scancel", training.job)
        for training, processes in zip(trainings, before, strict=True):
            ended(training, "CANCELLED", processes)
            assert all(end["code"] == 75 for end in training.ends()), training.ends()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_whose_time_ends_in_any_phase_restarts(cluster, tmp_path, launcher):
    """A rank takes 100 s for one call of a phase in each start; the second start has time for that."""
    trainings = {}
    try:
        for phase in PHASES:
            slow = {"rank": int(phase != "tokens"), "phase": phase, "call": 1, "fault": "slow"}
            trainings[phase] = Training(
                cluster, tmp_path / phase, launcher, 2, planted(slow), run_time_margin_s=EARLY_MARGIN_S
            )
        give_time_to_the_second_start(cluster, list(trainings.values()))
        for phase, training in trainings.items():
            training.wait_for("steps", partial(num_steps_over, training, 3), SLOW_S)
            ends, text = training.ends(), training.console()
            assert [end["code"] for end in ends] == [75], f"{ends}\n{text}"
            assert f"in phase {phase}" in text and "the same command to resume" in text, text
            assert "Traceback" not in text and "is in use by" not in text, text
        for training in trainings.values():
            before = cluster.processes(training.job)
            cluster.cancel(training.job)
            no_process_left(cluster, training.job, before)
    finally:
        for training in trainings.values():
            cluster.cancel(training.job)


def give_time_to_the_second_start(cluster: Slurm, trainings: list[Training]) -> None:
    """Wait until each job was requeued once, and give it another limit before it starts again."""
    waiting = {training.job for training in trainings}

    def all_have_it() -> bool:
        for job in [job for job in waiting if cluster.restarts(job)]:
            cluster.run("scontrol", "update", f"jobid={job}", "timelimit=50")
            waiting.remove(job)
        return not waiting

    cluster.wait_for("a second start of each job", all_have_it, SLOW_S, lambda: f"not of {waiting}")


def num_steps_over(training: Training, least: int) -> bool:
    return lines_in(training.run_dir) > least


def test_a_job_leaves_before_its_time_and_restarts_and_what_outlives_it_is_killed(cluster, groups):
    """A rank that is stopped whenever Slurm continues it neither hears nor leaves.

    After SIGTERM at the limit it is killed.
    """
    for trainings in groups(MINUTES, run_time_margin_s=MARGIN_S, comm_timeout_s=900):
        before = processes_of(trainings)
        await_requeue(trainings, before, starts=2, noted=1)
        before = processes_of(trainings)
        with kept_stopped([training.a_rank() for training in trainings]):
            for training in trainings:
                cluster.run("scontrol", "update", f"jobid={training.job}", "timelimit=1")
            for training, processes in zip(trainings, before, strict=True):
                ended(training, "TIMEOUT", processes)
                assert len(training.ends()) == 1, training.ends()

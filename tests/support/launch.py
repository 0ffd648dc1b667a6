"""Start ranks as a user does.

This environment's mpirun and its `mpitrain`, with what more ranks than cores need, and an end.

    done = mpirun(2, MPITRAIN, "run", "--set", "run.steps=3")  waits, at most `timeout` seconds
    with started(2, MPITRAIN, "run", ...) as job:              to do something to it meanwhile
    one, two = run_commands(2, ["run", ...], ["run", ...])          one after the other in the same
                                                               ranks: torch is loaded once

Whatever happens, no process of a job outlives the call, nor pytest if that is killed
(tests/support/reaper.py). Seconds of limits are those of an idle machine: see patience(). Most ranks have
their libraries loaded already, as tests/support/preload.py says; MPITRAIN_PRELOAD=no starts all from nothing.
"""

import atexit
import faulthandler
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import reaper
from preload import MARK, SESSION_LENGTH, name_of

HERE = Path(sys.executable).parent
MPITRAIN = str(HERE / "mpitrain")
MPIRUN = str(HERE / "mpirun") if (HERE / "mpirun").exists() else shutil.which("mpirun")

# A waiting rank has to leave the core to a working one. Each MPI ignores what is meant for the
# other.
MORE_RANKS_THAN_CORES = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "true",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "OMPI_MCA_pml": "ob1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
# What tests start computes on the CPU wherever it runs: a GPU has other bits and times, and one is
# not there for every rank.
VISIBLE = "CUDA_VISIBLE_DEVICES"  # for AMD's, too
NO_GPU = {VISIBLE: ""}
WITH_GPU = {VISIBLE: os.environ.get(VISIBLE)}  # of tests marked gpu
# limits are for what hangs: what passes on an idle machine has so many times as long there
PATIENCE = 3
# times slower than an idle machine: for one that is slower still, what hangs would take hours
SLOWEST = 20.0
NICE = 1.25  # by so much a step of niceness lessens the share of a core that others want, too
OF_ANOTHER_JOB = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_")


class HangLimit:
    """The time after which all stacks are shown, in the process that starts jobs, of a test that still runs.

    pytest's own timer would end that process: no summary, and ranks that nobody ends. A rank keeps
    pytest's.
    """

    def __init__(self):
        self._limit_s = 0.0
        self._file = None
        self._within_a_test = False

    def use(self, limit_s: float, file: int) -> None:
        """Show stacks after `limit_s` seconds, on a descriptor. 0: never."""
        self._limit_s = limit_s
        self._file = file

    def begin(self) -> None:
        """A test begins: replace pytest's timer."""
        self._within_a_test = True
        self._arm()

    def end(self) -> None:
        self._within_a_test = False
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the timer around a wait that has a limit of its own; then the test has the whole
        time again.
        """
        if self._within_a_test:
            faulthandler.cancel_dump_traceback_later()
        try:
            yield
        finally:
            self._arm()

    def _arm(self) -> None:
        if self._within_a_test and self._limit_s:
            faulthandler.dump_traceback_later(self._limit_s, repeat=True, file=self._file)


HANG_LIMIT = HangLimit()  # conftest.py begins and ends it


def slowness() -> float:
    """Return how many times longer than on an idle machine something may take now, by the load and
    by this process's niceness.
    """
    competition = max(0.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)) - 1)
    return min(1 + competition * NICE ** max(0, os.nice(0)), SLOWEST)


def short(limit_s: float) -> int:
    """Return a limit of the program that a test waits out, and in which a healthy rank is to get
    something done on a busy machine.
    """
    return round(limit_s * slowness())


def patience(timeout: float) -> float:
    """Return the limit of a wait that may take `timeout` seconds on an idle machine."""
    return timeout * PATIENCE * slowness()


def finished(command: Sequence[str], timeout: float = 60, **given) -> subprocess.CompletedProcess:
    """Run a process that is no job to its end, as subprocess.run() does.

    At most `timeout` seconds of an idle machine. mpitrain with its libraries loaded, unless the test sees
    to what a process has when it starts.
    """
    env = given.get("env") or os.environ
    at_start = [name for name in {*env, *os.environ} if name.startswith(READ_AT_START)]
    as_here = all(env.get(name) == os.environ.get(name) for name in at_start)
    if command[0] == MPITRAIN and as_here and "preexec_fn" not in given:
        command = preloaded(command)
    with HANG_LIMIT.held():
        return subprocess.run(command, timeout=patience(timeout), check=given.pop("check", False), **given)


@dataclass
class Done:
    """How a job ended; `output` is stdout and stderr of mpirun and of all ranks, as they came.

    `returncode` None: it was too slow.
    """

    returncode: int | None
    output: str
    wall_s: float


class Job:
    """A running job."""

    def __init__(self, process: subprocess.Popen, output, mark: bytes):
        self.process = process
        self._output = output
        self._mark = mark
        self._begin = time.monotonic()
        self._name = name_of(mark.decode().partition("=")[2])

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, rank 0 first.

        The forks of tests/support/preload.py, or the Python processes of the job.
        """
        forks = {pid: name for pid in self._pids() if (name := _name(pid)).startswith(self._name)}
        if forks:
            return sorted(forks, key=lambda pid: int(forks[pid].removeprefix(self._name)))
        return sorted(pid for pid in self._pids() if "python" in _program(pid))

    def kill(self) -> None:
        """End every process of the job as a power cut does, and remove the shared memory that it leaves."""
        with HANG_LIMIT.held():
            left = reaper.kill(self._pids, patience(20), each_time=self.process.poll)
            assert not left, f"processes {left} of the job can't be killed:\n{self.text()}"
            self.process.wait()

    def signal(self, pid: int, number: signal.Signals) -> None:
        assert pid in self._pids()
        _signal(pid, number)

    def wait(self, timeout: float) -> Done:
        """Wait for the end, at most `timeout` seconds of an idle machine.

        Every wait for a job is this one or wait_for().
        """
        limit_s = patience(timeout)
        try:
            with HANG_LIMIT.held():
                self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return Done(None, f"{self.text()}\nkilled after {limit_s:.0f} s", time.monotonic() - self._begin)
        return Done(self.process.returncode, self.text(), time.monotonic() - self._begin)

    def wait_for(self, ready: Callable[[], bool], timeout: float) -> None:
        """Poll until `ready()`; fail with the output if the job ends before, or after `timeout`
        seconds of an idle machine.
        """
        limit_s = patience(timeout)
        end = time.monotonic() + limit_s
        with HANG_LIMIT.held():
            while not ready():
                assert self.process.poll() is None, (
                    f"ended with {self.process.returncode} while waited for:\n{self.text()}"
                )
                assert time.monotonic() < end, f"not ready after {limit_s:.0f} s:\n{self.text()}"
                time.sleep(0.002)

    def text(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text(encoding="utf-8", errors="replace")

    def _pids(self) -> list[int]:
        """Return every process of the job, by a mark in its environment.

        Launchers put ranks into sessions of their own.

        A fork of tests/support/preload.py shows the environment of what it was forked from; it has a name
        for it.
        """
        return reaper.processes(lambda pid, given: self._mark in given or _name(pid).startswith(self._name))


def _name(pid: int) -> str:
    """Return the name of a process; none when it has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    name, _, rest = state.partition("(")[2].rpartition(")")
    return "" if rest.split()[0] == "Z" else name


def _program(pid: int) -> str:
    """Return the path of a process's program; none when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")[0]
    except OSError:
        return ""


def environment(**changes: str | None) -> dict[str, str]:
    """Return the environment for a job.

    Nothing inherited from a launcher, room for more ranks than cores, and no GPU. None: without.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_ANOTHER_JOB)}
    found = {**kept, **MORE_RANKS_THAN_CORES, **NO_GPU, **changes}
    return {name: value for name, value in found.items() if value is not None}


@contextmanager
def started(
    num_ranks: int,
    *command: str,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    forked: bool = True,
) -> Iterator[Job]:
    """Start `command` on `num_ranks` ranks, or without mpirun if 0.

    At the end of the block nothing of it is left.

    forked: its libraries may be loaded before.
    """
    assert MPIRUN, "no mpirun beside this Python or on the path"
    if forked and not UNTOUCHED & {*(env or {})}:
        command = preloaded(command)
    launcher = [MPIRUN, "-n", str(num_ranks)] if num_ranks else []
    mark = f"{MARK}={os.environ.get(MARK, '')[:SESSION_LENGTH]:0<{SESSION_LENGTH}}{uuid.uuid4().hex}"
    with tempfile.NamedTemporaryFile(prefix="mpitrain-test-") as output:
        process = subprocess.Popen(
            [*launcher, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(**(env or {}), **dict([mark.split("=")])),
            cwd=cwd,
            start_new_session=True,  # a Ctrl-C is for pytest, which then ends the job
            preexec_fn=hear_all,
        )
        job = Job(process, output, mark.encode())
        try:
            yield job
        finally:
            job.kill()
            # Open MPI's launcher, killed, leaves files by its pid: the next one with that pid
            # doesn't start (openpmix issue 4022)
            shutil.rmtree(Path(tempfile.gettempdir(), f"ompi.{process.pid}"), ignore_errors=True)


def mpirun(
    num_ranks: int,
    *command: str,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    timeout: float = 90,
    forked: bool = True,
) -> Done:
    """Run `command` on `num_ranks` ranks as started() does, to its end."""
    with started(num_ranks, *command, env=env, cwd=cwd, forked=forked) as job:
        return job.wait(timeout)


# the variables that Python and its loader read, which a fork can't do again
READ_AT_START = ("PYTHONIO", "PYTHONUTF8", "PYTHONCOERCE", "PYTHONUN", "PYTHONHASH", "LD_", "LC_", "LANG")
PRELOAD, STAND_IN = (str(Path(__file__).with_name(name)) for name in ("preload.py", "rank_proxy.py"))
UNTOUCHED = {"LD_PRELOAD", VISIBLE}  # in an environment: what is to be there when Python starts


def preloaded(command: Sequence[str]) -> list[str]:
    """Return what runs mpitrain or a Python program with its libraries loaded; any other command as it is.

    Under Open MPI mpitrain isn't forked: it would not find the launcher above itself, whose terminal and
    standard error it uses.
    """
    program = command[1:] if command[0] == sys.executable else command
    can_fork = program[0].endswith(".py") or (program[0] == MPITRAIN and is_mpich())
    if not can_fork or os.environ.get("MPITRAIN_PRELOAD") == "no":
        return list(command)
    return [sys.executable, "-S", "-E", STAND_IN, _server(), *program]


def hear_all() -> None:
    """Hear, in a child, what the shell ignores for a pytest that it starts in the background, or
    below nohup.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@functools.cache
def is_mpich() -> bool:
    command = [MPIRUN, "--version"]
    return b"HYDRA" in subprocess.run(command, capture_output=True, env=environment(), check=True).stdout


@functools.cache
def _server() -> str:
    """Start the one that forks ranks, once; it ends with this process."""
    address = f"mpitrain-test-{uuid.uuid4().hex}"
    server = subprocess.Popen(
        [sys.executable, PRELOAD, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
        start_new_session=True,
        preexec_fn=hear_all,
    )
    atexit.register(server.communicate)  # closes its stdin
    assert server.stdout.readline() == b"ready\n"
    return address


LONGEST_ARGUMENT = 100_000  # Linux takes 131,071 characters
SEQUENCE = Path(__file__).with_name("command_sequence.py")


def run_commands(
    num_ranks: int,
    *commands: Sequence[str],
    program: Path = SEQUENCE,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    timeout: float = 90,
) -> list[Done]:
    """Run commands of mpitrain one after the other in the same ranks, by tests/support/command_sequence.py.

    Return how each ended.

    program: one that calls command_sequence.main(). More of them than one argument holds are run in two
    jobs.
    """
    if len(json.dumps(commands)) > LONGEST_ARGUMENT:
        how = dict(program=program, env=env, cwd=cwd, timeout=timeout)
        half = len(commands) // 2
        return run_commands(num_ranks, *commands[:half], **how) + run_commands(
            num_ranks, *commands[half:], **how
        )
    with tempfile.TemporaryDirectory(prefix="mpitrain-test-") as folder:
        env = {
            **(env or {}),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(SEQUENCE.parent), os.environ.get("PYTHONPATH")))),
        }
        job = mpirun(
            num_ranks,
            sys.executable,
            str(program),
            folder,
            json.dumps(commands),
            env=env,
            cwd=cwd,
            timeout=timeout,
        )
        return [_one_of_several(Path(folder), number, job) for number in range(len(commands))]


def _one_of_several(folder: Path, number: int, job: Done) -> Done:
    said = folder / str(number)
    codes = folder / f"{number}.codes"
    output = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
    if job.returncode != 0:
        return Done(job.returncode, f"{output}\nbut not all of the commands ended:\n{job.output}", job.wall_s)
    return Done(max(map(int, codes.read_text().split())), output, job.wall_s)


def planted(plan: dict[str, object]) -> dict[str, str]:
    """Return the environment that plants a fault in one rank, as planted/sitecustomize.py says."""
    path = os.pathsep.join(
        filter(None, (str(Path(__file__).with_name("planted")), os.environ.get("PYTHONPATH")))
    )
    return {"PYTHONPATH": path, "PLANTED": json.dumps(plan)}


def run_several(
    num_ranks: int, text: Path, runs: Mapping[Path, Mapping[str, object]], timeout: float = 180
) -> None:
    """Train the tiny model in each of some run directories, with its changes, in the same ranks."""
    commands = [("run", *tiny(run_dir, text, **changes)) for run_dir, changes in runs.items()]
    for done in run_commands(num_ranks, *commands, timeout=timeout):
        assert done.returncode == 0, tail(done.output)


def tail(text: str, lines: int = 150) -> str:
    return "\n".join(text.splitlines()[-lines:])


# ---------------------------------------------------------------- runs of a very small model

TINY = {
    "model.layers": 4,
    "model.width": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.ffn": 64,
    "data.source": "text",
    "data.sequence": 32,
    "batch.global": 8,
    "batch.micro": 2,
    "run.steps": 30,
    "run.eval_every": 10,
    "comm.timeout_s": 200,
}
LOSS_KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "skipped", "val_loss")


def options(settings: dict[str, object]) -> list[str]:
    """Return `--set key=value ...`."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def write_text(path: Path, size: int = 60_000) -> Path:
    """Write a corpus: the source of a module that every Python has."""
    path.write_bytes(Path(shutil.__file__).read_bytes()[:size])
    return path


def two_texts(folder: Path) -> Path:
    """Write a corpus of two files, which have 3 and 6 bytes."""
    folder.mkdir()
    (folder / "1.txt").write_text("one")
    (folder / "2.txt").write_text("zwölf")
    return folder


def words_file(path: Path, vocab: Mapping[str, int]) -> Path:
    """Write a tokenizer of whole words; it has no end of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def run_tiny(
    num_ranks: int,
    run_dir: Path,
    text: Path,
    *,
    env: dict[str, str] | None = None,
    timeout: float = 90,
    **changes,
) -> Done:
    """Run `mpitrain run` with the tiny model; a change is written parallel_pp=2 for parallel.pp."""
    return mpirun(num_ranks, MPITRAIN, "run", *tiny(run_dir, text, **changes), env=env, timeout=timeout)


def tiny(run_dir: Path, text: Path, **changes) -> list[str]:
    """Return the options of `mpitrain run` for the tiny model."""
    dotted = {key.replace("_", ".", 1): value for key, value in changes.items()}
    return options({**TINY, "run.dir": run_dir, "data.path": text, **dotted})


def lines_in(run_dir: Path) -> int:
    """Return the number of steps that metrics.jsonl tells of; its first line is of step 0."""
    try:
        return (run_dir / "metrics.jsonl").read_bytes().count(b"\n") - 1
    except FileNotFoundError:
        return -1


def loss_lines(run_dir: Path) -> list[str]:
    """Return what a run computed, a text for each step.

    Floats are written in full, so equal text means equal bits.
    """
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [json.dumps({key: line[key] for key in LOSS_KEYS if key in line}) for line in lines]


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return

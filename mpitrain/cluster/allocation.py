"""When the time that this job was given is over: the earlier of what scheduler and user say.

    MPITRAIN_JOB_END  seconds since 1970; jobs/ sets it where the scheduler tells its jobs nothing
                      (PBS, LSF, Kubernetes)
    Slurm             SLURM_JOB_END_TIME (not before 23.02), else `squeue -o %L`; only of the job
                      that this process runs in
    Flux              `flux job timeleft`, in seconds
    LSF               `bjobs -o time_left`, in hours:minutes
    PBS               `qstat -f`: its start and its walltime; of Torque PBS_WALLTIME, in seconds
                      from the start of this process
    run.time_limit    of the user, from the start of this process

An end is kept on a clock that nobody sets (now()). A time of day is converted once, when read:
clocks are set later, by hand or by NTP.

Sources: sbatch(1), squeue(1), "Job Array Support" and "Heterogeneous Job Support" of Slurm,
flux-job(1), bjobs(1), "Job Arrays" of LSF, qstat(1B), and qsub(1B) of Torque.
"""

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpitrain.cluster.processes import parents_of, stat_of
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown

ANSWER_S = 10.0  # a scheduler that takes longer is asked no more
UNLIMITED_S = 2**32 - 2  # what Flux says of a job without a limit, or more
FIRST_PROCESS_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of Linux
YEAR_10000 = 253_402_300_800  # in seconds since 1970; later is a mistake, such as milliseconds
OWN = "MPITRAIN_JOB_END"
CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS' MONOTONIC counts on, too


class End(NamedTuple):
    """When the time is over, on the clock of now(), and who says so."""

    due: float
    source: str

    @property
    def left_s(self) -> float:
        return self.due - now()

    def distance(self) -> str:
        """Return how far away the end is, before it or after it, in words."""
        left_s = self.left_s
        return f"{abs(left_s):.0f} s {'before' if left_s >= 0 else 'after'} {self}"

    def __str__(self) -> str:
        at = time.localtime(round(time.time() + self.left_s))
        return f"{time.strftime('%Y-%m-%d %H:%M:%S %z', at)} ({self.source})"


class Allotted(NamedTuple):
    """The time of this job: its end, and for how long before it the run has left."""

    end: End
    margin_s: float

    @property
    def is_over(self) -> bool:
        return self.end.left_s < self.margin_s


def allotted(end: End | None, margin_s: float) -> Allotted | None:
    """Return the time of a job that begins now; of a short one at most half is left unused."""
    return None if end is None else Allotted(end, min(margin_s, max(0.0, end.left_s) / 2))


def now() -> float:
    """Return the seconds of a clock that nobody sets; it counts on while a machine sleeps."""
    return time.clock_gettime(CLOCK)


def end_after(seconds: float, source: str) -> End:
    """Return the end of so many seconds from now on."""
    return End(now() + seconds, source)


def end_at(time_of_day: float, source: str) -> End:
    """Return the end at a time of day, in seconds since 1970."""
    return end_after(time_of_day - time.time(), source)


def end_of_allocation(
    time_limit: str,
    environment: Mapping[str, str] = os.environ,
    note: Callable[[str], object] = lambda text: None,
) -> End | None:
    """Return when this job has to be gone, or None. May start the scheduler's command.

    time_limit: run.time_limit, "" for none.  note: is given an end that is left out.
    Raises ConfigError as end_of_user() does. An end that is over is another job's, left in a shell.
    """
    ends = [end_after(seconds_of(time_limit) - age_s(), "run.time_limit")] if time_limit else []
    for said in _scheduler_ends(environment, note):
        if said.left_s >= YEAR_10000 - time.time():
            note(f"{said.source} says that this job ends after the year 9999: ignored")
        elif said.left_s > 0:
            return min([*ends, said])
    return min(ends, default=None)


def end_of_user(environment: Mapping[str, str] = os.environ) -> End | None:
    """Return what MPITRAIN_JOB_END says, or None. Raises ConfigError for no time since 1970."""
    text = environment.get(OWN, "")
    if not text:
        return None
    if not re.fullmatch(r"\d{1,12}", text, re.ASCII) or int(text) >= YEAR_10000:
        raise ConfigError(
            f'{OWN} = "{shown(text)}": expected seconds since 1970, such as $(($(date +%s) + 3600)) for an '
            "hour from now"
        )
    return end_at(float(text), OWN)


def seconds_of(text: str, name: str = "run.time_limit") -> float:
    """Return the seconds of a limit, [days-]hours:minutes:seconds. Raises ConfigError, also for 0.

    name: what the user calls it.
    """
    match = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,5}):([0-5]\d):([0-5]\d)", text, re.ASCII)
    if match is None or not text.strip("0:-"):
        raise ConfigError(
            f'{name} = "{shown(text)}": expected hours:minutes:seconds, such as "12:00:00", or with days '
            'before it, such as "2-00:00:00"'
        )
    return _seconds_in(match)


def _seconds_in(match: re.Match[str]) -> float:
    """Return the seconds of days, hours, minutes and seconds, of which some may be missing."""
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def age_s() -> float:
    """Return this process's age: on a busy file system Python takes minutes to start."""
    with suppress(OSError):  # no Linux
        return now() - int(stat_of("self").fields[19]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _scheduler_ends(environment: Mapping[str, str], note: Callable[[str], object]) -> Iterator[End]:
    """Yield what the scheduler says, the best source first."""
    if own := end_of_user(environment):
        yield own
    yield from _slurm_ends(environment, note)
    if "FLUX_JOB_ID" in environment:
        yield from _from_now(_number(_answer("flux", "job", "timeleft")), "flux job timeleft")
    if job := environment.get("LSB_JOBID"):
        # all elements of an array have its LSB_JOBID; 0: no array
        index = environment.get("LSB_JOBINDEX", "0")
        element = job if index == "0" else f"{job}[{index}]"
        answer = _answer("bjobs", "-noheader", "-o", "time_left", element)
        hours = re.match(r"(\d+):(\d\d)\b", answer, re.ASCII)
        yield from _from_now(float(hours[1]) * 3600 + float(hours[2]) * 60 if hours else None, "bjobs")
    if job := environment.get("PBS_JOBID"):
        yield from _pbs_ends(_answer("qstat", "-f", job))
    if environment.get("PBS_WALLTIME", "").isdecimal():
        yield end_after(float(environment["PBS_WALLTIME"]) - age_s(), "PBS_WALLTIME")


def _slurm_ends(environment: Mapping[str, str], note: Callable[[str], object]) -> Iterator[End]:
    """Yield what Slurm says of this job. Shells in jobs hand on variables to what isn't in them."""
    job = environment.get("SLURM_JOB_ID", "")
    end = environment.get("SLURM_JOB_END_TIME", "")
    if not job and not end.isdecimal():
        return
    if not _runs_under_slurm(environment):
        inherited = "this process isn't in that job, it only inherited its variables"
        why = f"{inherited}; set {OWN} if it should count"
        note(f"the end of Slurm's job {shown(job or '?')} is ignored: {why}")
        return
    if end.isdecimal():
        yield end_at(float(end), "SLURM_JOB_END_TIME")
    if job:
        answer = _answer("squeue", "-h", "-j", job, "-o", "%A %L")
        yield from _from_now(_clock(_line_of(job, answer)), "squeue")


def _runs_under_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether this process is in the job that the environment names.

    A job's processes have slurmstepd above them, or its cgroup. Those of ssh have neither, but
    run on the job's nodes. In a container with its own processes the environment is believed.
    """
    if (
        any(name == "slurmstepd" for _, name in parents_of(os.getpid()))
        or _in_cgroup_of_slurm()
        or not _sees_all_processes()
    ):
        return True
    nodes = environment.get("SLURM_JOB_NODELIST", "")
    own = socket.gethostname().partition(".")[0]
    return bool(nodes) and own in _answer("scontrol", "show", "hostnames", nodes).split()


def _in_cgroup_of_slurm() -> bool:
    with suppress(OSError):
        return re.search(r"/job_\d+(/|$)", Path("/proc/self/cgroup").read_text(), re.MULTILINE) is not None
    return False


def _sees_all_processes() -> bool:
    """Return whether /proc shows this host's processes, and not those of a container only."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid") == FIRST_PROCESS_NAMESPACE
    return False  # no Linux


def _pbs_ends(output: str) -> Iterator[End]:
    """Yield the end of a PBS job: the start that `qstat -f` tells, and the walltime after it."""
    start = re.search(r"^\s*(?:stime|start_time) = (.+)$", output, re.MULTILINE)
    limit = re.search(r"^\s*Resource_List\.walltime = (\S+)$", output, re.MULTILINE)
    seconds = _clock(limit[1]) if limit else None
    if start and seconds is not None:
        with suppress(ValueError, OverflowError):
            began = time.mktime(time.strptime(start[1].strip(), "%a %b %d %H:%M:%S %Y"))
            yield end_at(began + seconds, "qstat")


def _line_of(job: str, output: str) -> str:
    """Return what squeue says of one job; "" if nothing.

    It lists others, too: the last task of an array has the array's id, and the first component of a
    heterogeneous job that of the whole.
    """
    match = re.search(rf"^{re.escape(job)} (.+)$", output, re.MULTILINE)
    return match[1] if match else ""


def _answer(*command: str) -> str:
    """Return what a command prints; "" if it isn't there, fails, or takes too long."""
    import subprocess  # by the rank that asks

    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _from_now(seconds: float | None, source: str) -> Iterator[End]:
    if seconds is not None and seconds < UNLIMITED_S:
        yield end_after(seconds, source)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII) else None


def _clock(text: str) -> float | None:
    """Return the seconds of [[days-]hours:]minutes:seconds; None of anything else, such as UNLIMITED."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text, re.ASCII)
    return _seconds_in(match) if match else None

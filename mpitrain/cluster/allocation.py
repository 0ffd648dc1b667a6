"""When the time that this job was given is over: as the scheduler says, and as the user does. The earlier of the two counts.

    MPITRAIN_JOB_END        seconds since 1970; jobs/ sets it where the scheduler tells its jobs nothing (PBS, LSF, Kubernetes)
    Slurm                   SLURM_JOB_END_TIME (not before 23.02), else `squeue -o %L`
    Flux                    `flux job timeleft`, in seconds
    LSF                     `bjobs -o time_left`, in hours:minutes
    PBS                     `qstat -f`: its start and its walltime; of Torque PBS_WALLTIME, in seconds from the start of this process
    run.time_limit          of the user, from the start of this process

Sources: sbatch(1), squeue(1), "Job Array Support" and "Heterogeneous Job Support" of Slurm, flux-job(1), bjobs(1), "Job Arrays" of
LSF, qstat(1B), and qsub(1B) of Torque.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import ConfigError
from mpitrain.inputs import shown

ANSWER_S = 10.0  # a scheduler that takes longer is asked no more
UNLIMITED_S = 2**32 - 2  # what Flux says of a job without a limit, or more
YEAR_10000 = 253_402_300_800  # in seconds since 1970; what lies behind it is a mistake, such as milliseconds
OWN = "MPITRAIN_JOB_END"


class End(NamedTuple):
    """When the time is over, in seconds since 1970, and who says so."""

    at: float
    source: str

    @property
    def left_s(self) -> float:
        return self.at - time.time()

    def __str__(self) -> str:
        return f"{time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(self.at))} ({self.source})"


def end_of_allocation(
    time_limit: str, environment: Mapping[str, str] = os.environ, note: Callable[[str], object] = lambda text: None
) -> End | None:
    """Return when this job has to be gone, or None if nobody says. May start the scheduler's own command, and waits for it a while.

    time_limit: run.time_limit, "" for none.  note: is told of an end that is left out because it can't be.  An end that is over is
    another job's, left in the environment of a shell.  Raises ConfigError as end_of_user() does.
    """
    now, began = time.time(), time.time() - age_s()
    ends = [End(began + seconds_of(time_limit), "run.time_limit")] if time_limit else []
    for said in _of_scheduler(environment, began):
        if said.at >= YEAR_10000:
            note(f"{said.source} says that this job ends after the year 9999: ignored")
        elif said.at > now:
            return min([*ends, said])
    return min(ends, default=None)


def end_of_user(environment: Mapping[str, str] = os.environ) -> End | None:
    """Return the end that the user's variable says, or None without it. Raises ConfigError unless it is a time since 1970."""
    text = environment.get(OWN, "")
    if not text:
        return None
    if not re.fullmatch(r"\d{1,12}", text, re.ASCII) or int(text) >= YEAR_10000:
        raise ConfigError(f'{OWN} = "{shown(text)}": expected seconds since 1970, such as $(($(date +%s) + 3600)) for an hour from now')
    return End(float(text), OWN)


def seconds_of(text: str, name: str = "run.time_limit") -> float:
    """Return a time limit in seconds. name: what the user calls it.

    Raises ConfigError unless it is hours:minutes:seconds, perhaps after days and a dash, and not nothing.
    """
    found = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,5}):([0-5]\d):([0-5]\d)", text, re.ASCII)
    if found is None or not text.strip("0:-"):
        raise ConfigError(
            f'{name} = "{shown(text)}": expected hours:minutes:seconds, such as "12:00:00", or with days before it, such as "2-00:00:00"'
        )
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


def age_s() -> float:
    """Return for how long this process has been there: on a busy file system Python alone takes minutes to start."""
    with suppress(OSError, ValueError, IndexError, AttributeError):  # no Linux
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return 0.0


def _of_scheduler(environment: Mapping[str, str], began: float) -> Iterator[End]:
    """Yield what the scheduler of this job says, the best source first."""
    if own := end_of_user(environment):
        yield own
    if environment.get("SLURM_JOB_END_TIME", "").isdecimal():
        yield End(float(environment["SLURM_JOB_END_TIME"]), "SLURM_JOB_END_TIME")
    if job := environment.get("SLURM_JOB_ID"):
        yield from _from_now(_clock(_line_of(job, _answer("squeue", "-h", "-j", job, "-o", "%A %L"))), "squeue")
    if "FLUX_JOB_ID" in environment:
        yield from _from_now(_number(_answer("flux", "job", "timeleft")), "flux job timeleft")
    if job := environment.get("LSB_JOBID"):
        index = environment.get("LSB_JOBINDEX", "0")  # all elements of an array have its LSB_JOBID; 0: no array
        element = job if index == "0" else f"{job}[{index}]"
        hours = re.match(r"(\d+):(\d\d)\b", _answer("bjobs", "-noheader", "-o", "time_left", element), re.ASCII)
        yield from _from_now(float(hours[1]) * 3600 + float(hours[2]) * 60 if hours else None, "bjobs")
    if job := environment.get("PBS_JOBID"):
        yield from _of_pbs(_answer("qstat", "-f", job))
    if environment.get("PBS_WALLTIME", "").isdecimal():
        yield End(began + float(environment["PBS_WALLTIME"]), "PBS_WALLTIME")


def _of_pbs(told: str) -> Iterator[End]:
    """Yield the end of a PBS job: the start that `qstat -f` tells, and the walltime after it."""
    start = re.search(r"^\s*(?:stime|start_time) = (.+)$", told, re.MULTILINE)
    limit = re.search(r"^\s*Resource_List\.walltime = (\S+)$", told, re.MULTILINE)
    seconds = _clock(limit[1]) if limit else None
    if start and seconds is not None:
        with suppress(ValueError, OverflowError):
            yield End(time.mktime(time.strptime(start[1].strip(), "%a %b %d %H:%M:%S %Y")) + seconds, "qstat")


def _line_of(job: str, told: str) -> str:
    """Return what squeue tells of one job; "" if nothing.

    The last task of an array has the array's id, and the first component of a heterogeneous job that of the whole: asked for it, squeue
    tells of all the others, too.
    """
    found = re.search(rf"^{re.escape(job)} (.+)$", told, re.MULTILINE)
    return found[1] if found else ""


def _answer(*command: str) -> str:
    """Return what a command prints; "" if it isn't there, fails, or takes too long."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _from_now(seconds: float | None, source: str) -> Iterator[End]:
    if seconds is not None and seconds < UNLIMITED_S:
        yield End(time.time() + seconds, source)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text, re.ASCII) else None


def _clock(text: str) -> float | None:
    """Return the seconds of [[days-]hours:]minutes:seconds; None of anything else, such as UNLIMITED."""
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text, re.ASCII)
    if found is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds

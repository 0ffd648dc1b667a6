"""`mpitrain job again`: whether a job that has ended is to be started once more.

Jobs ask it at their end (jobs/).

    exit code of the run  again?
    0                     no: done, if the newest checkpoint is of step run.steps
    2                     no: what was given can't work, and would not the next time
    75, and any other     yes, unless it was the last of `most` starts, or the last of 3 in a row
                          without progress

A 0 alone isn't believed: a rank that a library ends by exit(0) can make it that of MPICH's mpirun.

Progress is a newer checkpoint, a newer step in memory (recovery.every), or more tokens prepared: a
large corpus takes several starts. Of memory of other nodes it is the step after which the last
start has resumed. What is counted is in ends.jsonl of the run directory, a line for each end:
`time job code step tokens`.
"""

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mpitrain import config as settings
from mpitrain.checkpoint.folders import find
from mpitrain.cluster.launch import job_of_scheduler
from mpitrain.cluster.rundir import RunDir, number_in, require_own, step_in
from mpitrain.data.tokens import num_prepared
from mpitrain.errors import BAD_INPUT, DONE, STOPPED_EARLY, CheckpointError
from mpitrain.inputs import append_lines, open_regular, os_errors_as, read_regular, shown
from mpitrain.training.saving.memory_folder import newest_step_in_memory, resumed_step

# exit codes of this command: for `&&`
AGAIN = 0
ENOUGH = 1
UNFINISHED = 3  # no more, though the run isn't done and its exit code was 0
IDLE = 3  # ends in a row without progress
TIME = "%Y-%m-%d %H:%M:%S %z"
MOST_BYTES = 1 << 22


class AgainVerdict(NamedTuple):
    """Whether to start again, and why or why not."""

    again: bool
    why: str


def main(code: int, config: str | None, overrides: tuple[str, ...], most: int) -> tuple[int, str]:
    """Note how a run ended; return the exit code for the job's script, and what to say."""
    run = settings.load(config, overrides).run
    rundir = RunDir(run.dir)
    if code == BAD_INPUT:
        return ENOUGH, "no restart: the run was refused (exit code 2), and would be again"
    step = max(find(rundir.checkpoints), default=0)
    if code == DONE and step >= run.steps:
        return ENOUGH, "done"
    in_memory, resumed = newest_step_in_memory(rundir), resumed_step(rundir)
    newest = max(step, in_memory, resumed)
    noted = _noted(rundir.ends)
    tokens = num_prepared(rundir.data)
    end = {
        "time": time.strftime(TIME),  # of the end
        "began": _began(rundir.config),  # of the start, which writes config.toml
        "reached": _reached(rundir.metrics),  # last step of metrics.jsonl; what isn't saved is lost
        "job": job_of_scheduler(),  # the scheduler's number of the job
        "code": code,  # exit code of the run
        "step": newest,  # step of the newest checkpoint, or of copies in memory
        "tokens": tokens,  # tokens of the corpus that are prepared
    }
    _note(rundir.ends, end)
    steps, all_tokens = zip(*noted, (newest, tokens))
    verdict = judge(steps, most, all_tokens)
    line = f"the newest checkpoint is of step {step}" if step else "there is no checkpoint yet"
    if tokens and not step:
        line = f"{tokens:,} tokens are prepared, no step is saved"
    if newest > step:
        where = "is in memory" if newest == in_memory else "was in memory when it was started"
        line = f"{line}, step {newest} {where}"
    is_short = code == STOPPED_EARLY and not verdict.again
    too_short = " or, if they left for want of time, ask for more" * is_short
    no_end = f"; run.steps = {run.steps}, so it isn't done" if code == DONE else ""
    no_more = UNFINISHED if code == DONE else ENOUGH
    said = f"ended with exit code {code}, {line}{no_end}: {verdict.why}{too_short}"
    return AGAIN if verdict.again else no_more, said


def judge(steps: Sequence[int], most: int, tokens: Sequence[int] = ()) -> AgainVerdict:
    """Decide, by the step of the newest checkpoint at each end so far, and by the tokens that were prepared.

    The last one is now's.
    """
    if len(steps) >= most:
        why = f"no restart: this was start {len(steps)} of at most {most} (--most; ends.jsonl counts them)"
        return AgainVerdict(False, why)
    progress = [_grew(steps, end) or _grew(tokens, end) for end in range(len(steps))]
    idle = next((count for count, grew in enumerate(reversed(progress)) if grew), len(steps))
    if idle >= IDLE:
        return AgainVerdict(
            False,
            f"no restart: no newer checkpoint after {idle} starts in a row; look into the logs of "
            "the last ones",
        )
    return AgainVerdict(True, f"again, start {len(steps) + 1} of at most {most}")


def _grew(counts: Sequence[int], end: int) -> bool:
    """Return whether a count was higher at an end than at all ends before."""
    return end < len(counts) and counts[end] > max((0, *counts[:end]))


def _noted(path: Path) -> list[tuple[int, int]]:
    """Return the steps and tokens of all ends so far; a line that a full disk has torn is none."""
    content = b""
    restart = "remove it to count from the beginning"
    with os_errors_as(CheckpointError, shown(path), restart), suppress(FileNotFoundError):
        # what a link in a stranger's run directory leads to is neither read nor written
        require_own(path.parent)
        content = read_regular(path, MOST_BYTES)
    progress = [(step_in(line), number_in(line, "tokens") or 0) for line in content.splitlines(keepends=True)]
    return [(step, tokens) for step, tokens in progress if step is not None]


def _began(config: Path) -> str:
    """Return when config.toml was written, "" if it wasn't."""
    try:
        return time.strftime(TIME, time.localtime(config.stat().st_mtime))
    except OSError:
        return ""


def _reached(metrics: Path) -> int:
    """Return the last step that has a line, 0 if none has."""
    try:
        with open(open_regular(metrics), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MOST_BYTES))
            steps = [step for line in file if (step := step_in(line)) is not None]
    except OSError:
        return 0
    return steps[-1] if steps else 0


def _note(path: Path, line: dict) -> None:
    why = "nothing counts the starts of this job, so it isn't started again"
    with os_errors_as(CheckpointError, shown(path), why):
        path.parent.mkdir(parents=True, exist_ok=True)  # the run may have ended before it made it
        append_lines(path, json.dumps(line).encode() + b"\n")

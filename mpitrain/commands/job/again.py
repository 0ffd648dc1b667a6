"""`mpitrain job again`: whether a job that has ended is to be started once more. Jobs ask it at their end (jobs/).

    exit code of the run    again?
    0                       no: done
    2                       no: what was given can't work, and would not the next time
    75, and any other       yes, unless it was the last of `most` starts, or the last of 3 in a row without a newer checkpoint

What it counts is in ends.jsonl of the run directory, a line for each end: `time job code step`.
"""

import json
import time
from pathlib import Path
from typing import NamedTuple

from mpitrain import config as settings
from mpitrain.checkpoint.folders import find
from mpitrain.cluster.launch import job_of_scheduler
from mpitrain.cluster.rundir import RunDir, require_own
from mpitrain.errors import BAD_INPUT, DONE, CheckpointError
from mpitrain.inputs import read_text

AGAIN, ENOUGH = 0, 1  # exit codes of this command: for `&&`
IDLE = 3  # ends in a row without progress
MOST_BYTES = 1 << 22


class Verdict(NamedTuple):
    """Whether to start again, and why or why not."""

    again: bool
    why: str


def main(code: int, config: str | None, overrides: tuple[str, ...], most: int) -> tuple[int, str]:
    """Note how a run ended; return the exit code for the job's script, and what to say."""
    rundir = RunDir(settings.load(config, overrides).run.dir)
    if code in (DONE, BAD_INPUT):
        return ENOUGH, {DONE: "done", BAD_INPUT: "not again: the run was refused (exit code 2), and would be the next time"}[code]
    steps = _noted(rundir.ends)
    steps.append(max(find(rundir.checkpoints), default=0))
    _note(rundir.ends, {"time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "job": job_of_scheduler(), "code": code, "step": steps[-1]})
    verdict = judge(steps, most)
    return AGAIN if verdict.again else ENOUGH, f"ended with exit code {code}, the newest checkpoint is of step {steps[-1]}: {verdict.why}"


def judge(steps: list[int], most: int) -> Verdict:
    """Decide, by the step of the newest checkpoint at each end so far; the last one is now's."""
    if len(steps) >= most:
        return Verdict(False, f"not again: this was start {len(steps)} of at most {most} (--most; ends.jsonl counts them)")
    best = [max((0, *steps[:end])) for end in range(len(steps))]
    idle = next((count for count, (step, before) in enumerate(zip(reversed(steps), reversed(best))) if step > before), len(steps))
    if idle >= IDLE:
        return Verdict(False, f"not again: no newer checkpoint after {idle} starts in a row; look into the logs of the last ones")
    return Verdict(True, f"again, start {len(steps) + 1} of at most {most}")


def _noted(path: Path) -> list[int]:
    """Return the steps of all ends so far; a line that a full disk has torn is none."""
    try:
        require_own(path.parent)  # what a link in a stranger's run directory leads to is neither read nor written
        lines = read_text(path, MOST_BYTES).splitlines() if path.exists() else []
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; remove it to count from the beginning") from None
    steps = []
    for line in lines:
        try:
            steps.append(int(json.loads(line)["step"]))
        except (ValueError, KeyError, TypeError):
            continue
    return steps


def _note(path: Path, line: dict) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # the run may have ended before it made it
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; nothing counts the starts of this job, so it isn't started again") from None

"""Failures: a killed rank, a stopped rank, a damaged checkpoint, and what a save costs."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from measuring.report import LIMIT_S, Report
from measuring.runs import Run, command_of, read, same_bits, train
from measuring.worked import Worked, figure, table

KEYS = {"run.steps": 30, "run.save_every": 5}
POLL_S = 0.02
WIDTH = 200  # columns of a report that are shown


def compute(report: Report) -> None:
    report.program("mpitrain job slurm docs/course/small.toml --nodes 2 --time 1:00:00", most_lines=30)
    if report.slow:
        _worked(report)


def _worked(report: Report) -> None:
    """The best interval of saves: 8 nodes, each with a failure in 20,000 hours."""
    model = "--set model.preset=llama3-8b --set data.sequence=8192 --set batch.global=512"
    planned = f"mpitrain plan --ranks 64 --machine h100-80gb {model} --set precision.compute=bf16"
    printed = report.run(f"{planned} --tokens 1T --node-hours 20000")
    stall = figure(r"stall training for ([\d.]+) s", printed)
    every = figure(r"every (\d+) minutes", printed)
    job = {"H": 20_000, "n": 8}
    rows = [
        Worked("hours between failures of the job", "H / n", job),
        Worked(
            "best interval, background saves, minutes",
            "sqrt(2 * x * 3600*H/n) / 60",
            {**job, "x": stall},
            every,
        ),
        Worked("best interval, saves of 12 s, minutes", "sqrt(2 * x * 3600*H/n) / 60", {**job, "x": 12}),
        Worked("of the time lost then, %", "100 * sqrt(2 * x / (3600*H/n))", {**job, "x": 12}),
    ]
    table(report, rows)


def measure(report: Report) -> None:
    whole = train(report, 2, "whole", KEYS)
    rows = [_saves(whole), _killed(report, whole), _damaged(report, whole)]
    report.table(["what happens", "what was seen", "measured"], rows)
    _stopped(report)


def _saves(run: Run) -> list[str]:
    """What a save in the background costs a step, against how long it takes."""
    saves = [save for line in run.metrics for save in line.get("saves", [])]
    took, stall = (sorted(save[key] for save in saves)[len(saves) // 2] for key in ("took_s", "stall_s"))
    measured = f"{stall * 1000:.0f} ms of standing still, {took * 1000:.0f} ms until it is committed"
    return ["a save", f"the median of {len(saves)} saves in the background", measured]


def _killed(report: Report, whole: Run) -> list[str]:
    """kill -9 of a rank after a dozen steps; the same command resumes."""
    seconds, code, _ = _disturbed(report, "killed", KEYS, signal.SIGKILL)
    report.run(command_of(2, "killed", KEYS))
    again = read(report, "killed")
    measured = (
        f"the job has ended after {seconds:.1f} s with exit code {code}; bits: {same_bits(again, whole)}"
    )
    return ["kill -9 of a rank, start again", "losses of all steps, of the run that was not killed", measured]


def _damaged(report: Report, whole: Run) -> list[str]:
    """One byte of the newest checkpoint flips; the run resumes from the one before."""
    folder = report.folder / "runs" / "killed" / "checkpoints"
    shard = max(folder.glob("step-*/shard-*.h5"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    printed = report.run(command_of(2, "killed", {**KEYS, "run.steps": 30}))
    said = next(line for line in printed.splitlines() if "altered" in line or "using step" in line)
    measured = f"`{said.strip()[:150]}`; bits: {same_bits(read(report, 'killed'), whole)}"
    return ["a flipped bit in a checkpoint", "the newest is refused, the one before is used", measured]


def _stopped(report: Report) -> None:
    """A rank is stopped: the others wait, and the watchdogs say for whom."""
    keys = {"run.steps": 400, "parallel.pp": 2, "comm.timeout_s": 10}
    _, _, printed = _disturbed(report, "stopped", keys, signal.SIGSTOP)
    lines = [line[:WIDTH] for line in printed.splitlines() if line.startswith("mpitrain: ")]
    report.text("hang", "\n".join(lines[:12]), command_of(2, "stopped", keys))


def _disturbed(report: Report, name: str, keys: dict, number: signal.Signals) -> tuple[float, int, str]:
    """Start a run, send rank 1 a signal after 12 steps, and return seconds until the end, code, output."""
    command = command_of(2, name, keys)
    report.commands.append(command)
    metrics = report.folder / "runs" / name / "metrics.jsonl"
    with report.started(command) as job:
        _wait(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 12)
        rank = _rank_1(job)
        begin = time.monotonic()
        os.kill(rank, number)
        printed, _ = job.communicate(timeout=LIMIT_S)
        seconds = time.monotonic() - begin
        if number == signal.SIGSTOP and Path(f"/proc/{rank}").exists():
            os.kill(rank, signal.SIGKILL)
    return seconds, job.returncode, printed


def _rank_1(job: subprocess.Popen) -> int:
    """Return the process of rank 1: a descendant of the launcher that has its number in its environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = set((folder / "environ").read_bytes().split(b"\0"))
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        is_rank = {b"PMI_RANK=1", b"OMPI_COMM_WORLD_RANK=1"} & variables and b"mpitrain" in words
        if is_rank and b"watchdog" not in words and job.pid in _ancestors(int(folder.name)):
            return int(folder.name)
    raise RuntimeError(f"{job.args}: found no process of rank 1")


def _ancestors(process: int) -> Iterator[int]:
    """Yield the parents of a process, up to the first."""
    while process > 1:
        status = Path(f"/proc/{process}/stat").read_text()
        process = int(status.rpartition(")")[2].split()[1])
        yield process


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError("the run made no progress")
        time.sleep(POLL_S)

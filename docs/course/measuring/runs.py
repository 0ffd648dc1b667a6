"""Train under mpirun, and read what a run leaves: metrics.jsonl and its last lines."""

import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from measuring.report import Report

SMALL = "docs/course/small.toml"
MEMORY_LINE = re.compile(r"^  (\w.*?)  +([\d,.]+) +([\d,.]+|-)$", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """What a run has left.

    metrics: the objects of metrics.jsonl.
    output: what was printed.
    """

    metrics: list[dict]
    output: str
    folder: Path

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics]

    def sent(self, axis: str) -> int:
        """Return the bytes that rank 0 has sent in a step over an axis."""
        found = {line["comm"].get(axis, {}).get("bytes", 0) for line in self.metrics[1:-1]}
        assert len(found) == 1, f"{axis}: steps differ: {found}"
        return found.pop()

    def calls(self, axis: str) -> int:
        return self.metrics[1]["comm"].get(axis, {}).get("calls", 0)

    def median(self, axis: str, what: str) -> float:
        """Return the median over steps of a time of an axis, in seconds."""
        return statistics.median(line["comm"][axis][what] for line in self.metrics[1:-1])

    @property
    def memory(self) -> dict[str, tuple[float, float | None]]:
        """Megabytes of rank 0, predicted and measured, by the first word of their line."""
        table = self.output.partition("memory of rank 0")[2].partition("\ndone")[0]
        return {
            name.partition(" (")[0]: (_number(predicted), None if measured == "-" else _number(measured))
            for name, predicted, measured in MEMORY_LINE.findall(table)
        }

    def held(self, what: str) -> float:
        """Return the measured megabytes of a row of the memory table."""
        return self.memory[what][1] or 0.0


def train(
    report: Report, ranks: int, name: str, keys: Mapping[str, object] | None = None, config: str = SMALL
) -> Run:
    """Train a configuration with some keys replaced, in runs/NAME."""
    output = report.run(command_of(ranks, name, keys or {}, config))
    return read(report, name, output)


def read(report: Report, name: str, output: str = "") -> Run:
    """Read what the run in runs/NAME has left."""
    folder = report.folder / "runs" / name
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "loss" in line]  # the first is a validation
    return Run(steps, output, folder)


def command_of(ranks: int, name: str, keys: Mapping[str, object], config: str = SMALL) -> str:
    """Return the command line of a run."""
    overrides = " ".join(f"--set {key}={value}" for key, value in {"run.dir": f"runs/{name}", **keys}.items())
    return f"mpirun -n {ranks} mpitrain run {config} {overrides}"


def same_bits(one: Run, other: Run) -> str:
    """Return whether losses and gradient norms of two runs are the same bits, in a word."""
    rows = [[(line["loss"], line["grad_norm"]) for line in run.metrics] for run in (one, other)]
    return "same" if rows[0] == rows[1] else "other"


def furthest(one: Run, other: Run) -> str:
    """Return the largest relative difference of the losses of two runs."""
    most = max(abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True))
    return f"{most:.0e}" if most else "0"


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def megabytes(num_bytes: float) -> str:
    """Return bytes as MB of 10**6, with three digits after the point."""
    return f"{num_bytes / 1e6:.3f}"

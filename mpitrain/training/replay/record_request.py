"""What `mpitrain run --record RANK:STEP` asks for. No torch: faults are refused before building."""

import re
from pathlib import Path
from typing import NamedTuple

from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import shown


class RecordRequest(NamedTuple):
    """Which rank and step are to be recorded."""

    rank: int
    step: int

    def __str__(self) -> str:
        return f"--record {self.rank}:{self.step}"

    @staticmethod
    def read(text: str | None) -> "RecordRequest | None":
        """Read RANK:STEP. Raises ConfigError."""
        if text is None:
            return None
        match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,18})", text)
        if match is None or not int(match[2]):
            needed = "expected RANK:STEP, ranks counted from 0 and steps from 1"
            raise ConfigError(f"--record {shown(text)}: {needed}, such as --record 3:120")
        return RecordRequest(int(match[1]), int(match[2]))

    def require(self, num_ranks: int, num_steps: int) -> None:
        """Raise ConfigError if there is no such rank or step."""
        if self.rank >= num_ranks:
            ranks = counted(num_ranks, "ranks")
            raise ConfigError(f"{self}: the run has {ranks}; give a rank from 0 to {num_ranks - 1}")
        if self.step > num_steps:
            change = "name a step up to that, or raise run.steps"
            raise ConfigError(f"{self}: run.steps = {num_steps}; {change}")

    def require_open(self, step: int, folder: Path) -> None:
        """Raise ConfigError if a run that resumes after `step` is past this one, unrecorded."""
        if self.step <= step and not self.path_in(folder).exists():
            change = "name a later step, or another run.dir"
            raise ConfigError(f"{self}: the run resumes after step {step}; {change}")

    def path_in(self, folder: Path) -> Path:
        """Return where the recording goes."""
        return folder / f"record-{self.rank}-{self.step}.npz"

"""What the user sees: rank 0 only, a live line on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from datetime import datetime, timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mpitrain.inputs import printable
from mpitrain.plan.settings.log_pace import LogPace


class RunReport:
    """Prints on rank 0; on other ranks it is silent. Use as a context manager around the steps."""

    def __init__(self, rank: int, steps: int, pace: LogPace):
        self.speaks = rank == 0
        self.steps = steps
        self._pace = pace
        self.console = Console(highlight=False, soft_wrap=True)
        self._last = 0.0
        # the first step that was shown, and when it was over
        self._first: tuple[int, float] | None = None
        self._live: Progress | None = None
        if self.speaks and self.console.is_terminal:
            columns = [
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[what]}"),
                TimeRemainingColumn(),
            ]
            self._live = Progress(*columns, console=self.console, transient=True)

    def __enter__(self) -> "RunReport":
        if self._live:
            self._show(self._live.start)
            self._task = self._live.add_task("training", total=self.steps, what="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._show(self._live.stop)

    def say(self, text: str) -> None:
        """Print some lines, if there is something to say."""
        if self.speaks and text:
            self._show(lambda: self.console.print(printable(text), markup=False))

    def _show(self, show: Callable[[], None]) -> None:
        """Write to the console; when that fails, fall silent.

        A full disk, a terminal or a reader that has gone is no reason to end a training:
        metrics.jsonl has everything. rich ends the program (SystemExit) when nobody reads.
        """
        try:
            show()
        except (OSError, ValueError, SystemExit):
            self.speaks = False

    def step(self, line: dict, waited_share: float) -> None:
        """Show a step; on a plain output at the pace of run.log_every, and always the first, the
        last and those that are validated.
        """
        step = line["step"]
        now = time.monotonic()
        self._first = self._first or (step, now)
        text = (
            f"step {step:5d}  loss {line['loss']:.4f}  norm {line['grad_norm']:.3f}  lr {line['lr']:.2e}  "
            f"{line['tokens_per_s']:,.0f} tokens/s  MFU {line['mfu']:.1%}  HFU {line['hfu']:.1%}  "
            f"waiting {waited_share:.0%}"
        )
        if "load_cv" in line:
            text += f"  loads +-{line['load_cv']:.0%}"
        if "val_loss" in line:
            text += f"  val loss {line['val_loss']:.4f}"
        if self._live:
            self._live.update(self._task, completed=step, what=text)
            self.say(text if "val_loss" in line else "")
        elif (
            "val_loss" in line
            or step in (self._first[0], self.steps)
            or self._pace.due(step, now - self._last)
        ):
            self._last = now
            self.say(f"{datetime.now():%Y-%m-%d %H:%M:%S}  {text}  {self._progress(line, now)}")

    def _progress(self, line: dict, now: float) -> str:
        """Say how long a step takes, how many tokens were read, and how long the rest takes at the
        pace of this start so far.
        """
        first, began = self._first
        step_s = (now - began) / (line["step"] - first) if line["step"] > first else line["step_s"]
        left = timedelta(seconds=round(step_s * (self.steps - line["step"])))
        return f"{line['step_s']:.3f} s a step  {line['tokens']:,} tokens so far  {left} left"

"""What the user sees: rank 0 only, a live line on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from mpitrain.inputs import printable
from mpitrain.plan.declared.screen import columns, filled, folded
from mpitrain.plan.settings.log_pace import LogPace

BAR = 20  # columns at most
REFRESHES = 2  # a second
GAP = "  "
TIME = "%H:%M:%S"
DATE_AND_TIME = f"%Y-%m-%d {TIME}"
NEEDED = 3  # fields that the live line always has, from the first one


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
        if self.speaks and sys.stdout.isatty() and not self.console.is_dumb_terminal:
            head, tail = (TextColumn(f"{{task.fields[{name}]}}", markup=False) for name in ("head", "tail"))
            self._bar = BarColumn(BAR)
            how = dict(console=self.console, transient=True, refresh_per_second=REFRESHES)
            self._live = Progress(head, self._bar, tail, **how)

    def __enter__(self) -> "RunReport":
        if self._live:
            try:
                self._show(self._live.start)
            except RuntimeError:  # no thread can be started: there are plain lines
                self._show(self._live.stop)
                self._live = None
                return self
            self._task = self._live.add_task("training", total=self.steps, head="training", tail="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._show(self._live.stop)

    def say(self, text: str) -> None:
        """Print some lines, if there is something to say."""
        if self.speaks and text:
            shown = folded(printable(text), columns())
            self._show(lambda: self.console.print(shown, markup=False))

    def _show(self, show: Callable[[], None]) -> None:
        """Write to the console, or fall silent; rich raises SystemExit when nobody reads."""
        try:
            show()
        except (OSError, ValueError, SystemExit):
            self.speaks = False

    def step(self, line: dict, waited_share: float) -> None:
        """Show a step; on a plain output as run.log_every says, and the first, last, validated."""
        step = line["step"]
        now = time.monotonic()
        self._first = self._first or (step, now)
        fields = self._fields(line, waited_share, self._left(line, now))
        is_validated = "val_loss" in line
        if self._live:
            self._update(self._live, step, fields)
            self.say(filled(fields, columns()) if is_validated else "")
        elif is_validated or step in (self._first[0], self.steps) or self._pace.due(step, now - self._last):
            self._last = now
            room = columns()
            when = f"{datetime.now():{TIME if room else DATE_AND_TIME}}"
            self.say(filled([when, *fields], room))

    def _update(self, live: Progress, step: int, fields: list[str]) -> None:
        """Show step, loss and time left whatever the width, then the bar, then what else fits."""
        room = self.console.width = columns()
        head = GAP.join([f"step {step}/{self.steps}", *fields[1:NEEDED]])
        self._bar.bar_width = min(BAR, max(1, room - len(head) - 1))
        before = f"{head} {'-' * self._bar.bar_width} "
        tail = filled([before, *fields[NEEDED:]], room, GAP).removeprefix(before).strip()
        live.update(self._task, completed=step, head=head, tail=tail)

    def _fields(self, line: dict, waited_share: float, left: timedelta) -> list[str]:
        """Return the fields of a line of a step, the most important first: a narrow terminal shows these."""
        return [
            f"step {line['step']:5d}",
            f"loss {line['loss']:.4f}",
            *([f"val loss {line['val_loss']:.4f}"] if "val_loss" in line else []),
            *_of_tasks(line),
            f"{left} left",
            f"{line['tokens_per_s']:,.0f} tokens/s",
            f"MFU {line['mfu']:.1%}",
            f"grad norm {line['grad_norm']:.3f}",
            f"lr {line['lr']:.2e}",
            f"waiting {waited_share:.0%}",
            f"HFU {line['hfu']:.1%}",
            *([f"loads +-{line['load_cv']:.0%}"] if "load_cv" in line else []),
            f"{line['step_s']:.3f} s a step",
            f"{line['tokens']:,} tokens so far",
        ]

    def _left(self, line: dict, now: float) -> timedelta:
        """Return how long the rest takes at the pace of this start so far."""
        first, began = self._first or (line["step"], now)
        step_s = (now - began) / (line["step"] - first) if line["step"] > first else line["step_s"]
        return timedelta(seconds=round(step_s * (self.steps - line["step"])))


def _of_tasks(line: dict) -> list[str]:
    """Return the first metric of each task, if the step was judged by some."""
    evaluations = {name: next(iter(metrics.items())) for name, metrics in line.get("evaluations", {}).items()}
    return [
        f"{printable(name)[:40]} {metric} {value:.4f}"
        for name, (metric, value) in evaluations.items()
        if metric != "loss"
    ]

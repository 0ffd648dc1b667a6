"""What the user sees: rank 0 only, a live line on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_EVERY_S = 5.0


class Report:
    """Prints on rank 0; on other ranks it is silent. Use as a context manager around the steps."""

    def __init__(self, rank: int, steps: int):
        self.speaks, self.steps = rank == 0, steps
        self.console = Console(highlight=False, soft_wrap=True)
        self._last = 0.0
        self._live: Progress | None = None
        if self.speaks and self.console.is_terminal:
            columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"), TimeRemainingColumn()]
            self._live = Progress(*columns, console=self.console, transient=True)

    def __enter__(self) -> "Report":
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
            self._show(lambda: self.console.print(text, markup=False))

    def _show(self, show: Callable[[], None]) -> None:
        """Write to the console; when that fails, fall silent.

        A full disk, a terminal or a reader that has gone is no reason to end a training: metrics.jsonl has everything. rich ends the
        program (SystemExit) when nobody reads.
        """
        try:
            show()
        except (OSError, ValueError, SystemExit):
            self.speaks = False

    def step(self, line: dict, waited_share: float) -> None:
        """Show a step; on a plain output every few seconds, and always the first and the last one."""
        text = (
            f"step {line['step']:5d}  loss {line['loss']:.4f}  norm {line['grad_norm']:.3f}  lr {line['lr']:.2e}  "
            f"{line['tokens_per_s']:,.0f} tokens/s  MFU {line['mfu']:.1%}  waiting {waited_share:.0%}"
        )
        if "load_cv" in line:
            text += f"  loads +-{line['load_cv']:.0%}"
        if "val_loss" in line:
            text += f"  val loss {line['val_loss']:.4f}"
        if self._live:
            self._live.update(self._task, completed=line["step"], what=text)
        due = time.monotonic() - self._last > PLAIN_EVERY_S
        if "val_loss" in line or (not self._live and (due or line["step"] in (1, self.steps))):
            self._last = time.monotonic()
            self.say(text)

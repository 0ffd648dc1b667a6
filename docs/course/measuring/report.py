"""Write the fragments of one page: programs, tables and pictures, with the commands that made them."""

import datetime
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measuring import machine

PAGES = (
    "one_rank",
    "recomputation",
    "gradient_accumulation",
    "data_parallel",
    "zero",
    "tensor_parallel",
    "context_parallel",
    "pipeline",
    "experts",
    "five_axes",
    "precision",
    "communication",
    "kernels",
    "profiling",
    "failures",
    "choosing",
)

# A waiting rank has to leave the core to a working one. Each MPI ignores what is meant for the other.
MORE_RANKS_THAN_CORES = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "true",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
WIDTH = 110  # columns of a printed program
LIMIT_S = 400  # of one command


class Report:
    """The fragments of one page.

    Commands run in `folder`, where `docs` leads to the documents of this clone, so that they are
    printed as a user types them in the root of a clone.
    """

    def __init__(self, course: Path, page: str, folder: Path):
        self.page = page
        self.folder = folder
        self.out = course / "measured" / page
        self.out.mkdir(parents=True, exist_ok=True)
        (folder / "docs").symlink_to(course.parent)
        self.commands: list[str] = []

    def run(self, command: str, *, fails: bool = False) -> str:
        """Run a command line, remember it for the next table, and return what it printed."""
        self.commands.append(command)
        done = subprocess.run(
            shlex.split(command),
            cwd=self.folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode and not fails:
            raise click_error(command, done)
        return done.stdout

    def started(self, command: str) -> subprocess.Popen:
        """Start a command line, in a session of its own."""
        return subprocess.Popen(
            shlex.split(command),
            cwd=self.folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def program(self, command: str, *, name: str = "program", most_lines: int = 40) -> None:
        """Write a fragment of a command and what it prints."""
        printed = self.run(command).rstrip().splitlines()
        if len(printed) > most_lines:
            left_out = f"... {len(printed) - most_lines} further lines"
            printed = [*printed[:most_lines], left_out]
        self.commands = []
        self._write(f"{name}.md", ["```text", f"$ {command}", *printed, "```"])

    def table(
        self, head: Sequence[str], rows: Sequence[Sequence[object]], *, name: str = "table", note: str = ""
    ) -> None:
        """Write a fragment of a table, with machine, date and the commands since the last one."""
        lines = [f"*{machine.line()}, {datetime.date.today().isoformat()}.*", ""]
        lines += _table(head, rows)
        if note:
            lines += ["", note]
        lines += ["", "```text", *(f"$ {command}" for command in dict.fromkeys(self.commands)), "```"]
        self.commands = []
        self._write(f"{name}.md", lines)

    def text(self, name: str, printed: str, command: str) -> None:
        """Write a fragment of what a command has printed, cut to what matters."""
        self._write(f"{name}.md", ["```text", f"$ {command}", *printed.splitlines(), "```"])

    def picture(self, name: str, svg: str) -> None:
        (self.out / f"{name}.svg").write_text(svg)

    def draw(self, command: str, name: str) -> str:
        """Run a command that draws with --out, keep its picture, and return what it printed."""
        printed = self.run(f"{command} --out {name}.svg")
        self.commands.pop()
        self.picture(name, (self.folder / f"{name}.svg").read_text())
        return printed

    def _write(self, name: str, lines: Sequence[str]) -> None:
        head = f"<!-- Made by: python docs/course/measure.py {self.page} -->"
        (self.out / name).write_text("\n".join([head, "", *lines, ""]))


def click_error(command: str, done: subprocess.CompletedProcess) -> RuntimeError:
    """Return the error of a command that should have ended well."""
    return RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout[-3000:]}")


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a Markdown table; numbers stand on the right."""
    columns = ["---:" if isinstance(cell, int | float) or _is_number(cell) else "---" for cell in rows[0]]
    body = [head, columns, *([_cell(cell) for cell in row] for row in rows)]
    return [f"| {' | '.join(map(str, line))} |" for line in body]


def _is_number(cell: object) -> bool:
    return re.fullmatch(r"[\d.,e+-]+%?( / .*)?", str(cell)) is not None


def _cell(cell: object) -> str:
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def _environment() -> dict[str, str]:
    """Return the environment of a command: this Python's programs first, and more ranks than cores."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": str(WIDTH)}
    return {**os.environ, **MORE_RANKS_THAN_CORES, **own}

"""Write the fragments of one page: programs, tables and pictures, with the commands that made them."""

import datetime
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
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
CUT = " ..."
CONTINUED = " \\"
LIMIT_S = 400  # of one command
DOCS = Path(__file__).resolve().parents[2]
MACHINE = "a node like this one"  # in a line that other machines print otherwise


def cut(line: str) -> str:
    """Return a line that is at most 110 columns wide; what is left out is marked."""
    if len(line) <= WIDTH:
        return line
    return line[: line.rindex(" ", 0, WIDTH - len(CUT) + 1)].rstrip() + CUT


def typed(command: str) -> list[str]:
    """Return the lines of a command as one types it, broken before an option or a key."""
    lines = ["$"]
    for word in re.split(r" (?=-)|(?<!--set) (?=[\w.]+=)", command):
        if len(lines[-1]) + len(word) + len(" " + CONTINUED) > WIDTH:
            lines[-1] += CONTINUED
            lines.append("   ")
        lines[-1] += f" {word}"
    return lines


def folded(line: str) -> list[str]:
    """Return the lines of a message of which nothing may be cut."""
    if len(line) <= WIDTH:
        return [line]
    return textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


class Report:
    """The fragments of one page.

    Commands run in `folder`, where `docs` leads to the documents of this clone, so that they are
    printed as a user types them in the root of a clone.
    out: where fragments are written.  printed: runs a command that leaves no files; default: in `folder`.
    slow: whether commands that take seconds run, too.
    """

    def __init__(
        self,
        folder: Path,
        page: str,
        out: Path,
        printed: Callable[[str], str] | None = None,
        *,
        slow: bool = True,
    ):
        self.page = page
        self.folder = folder
        self.out = out
        self.out.mkdir(parents=True, exist_ok=True)
        self.printed = printed
        self.slow = slow
        self.commands: list[str] = []
        if not (folder / "docs").exists():
            (folder / "docs").symlink_to(DOCS)

    def run(self, command: str, *, fails: bool = False) -> str:
        """Run a command line, remember it for the next table, and return what it printed."""
        self.commands.append(command)
        if self.printed is not None:
            return self.printed(command)
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
        printed = [line for line in self.run(command).rstrip().splitlines() if MACHINE not in line]
        if len(printed) > most_lines:
            left_out = f"... {len(printed) - most_lines} further lines"
            printed = [*printed[:most_lines], left_out]
        self.commands = []
        self._write(f"{name}.md", ["```text", *typed(command), *map(cut, printed), "```"])

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        name: str = "table",
        note: str = "",
        computed: bool = False,
    ) -> None:
        """Write a fragment of a table: the commands since the last one, with machine and date if measured."""
        measured = f"*Measured: {machine.line()}, {datetime.date.today().isoformat()}.*"
        lines = ["*Computed by the commands below.*" if computed else measured, ""]
        lines += _table(head, rows)
        if note:
            lines += ["", note]
        lines += ["", "```text"]
        for command in dict.fromkeys(self.commands):
            lines += typed(command)
        lines.append("```")
        self.commands = []
        self._write(f"{name}.md", lines)

    def text(self, name: str, printed: str, command: str) -> None:
        """Write a fragment of what a command has printed, cut to what matters."""
        lines = [part for line in printed.splitlines() for part in folded(line)]
        self._write(f"{name}.md", ["```text", *typed(command), *lines, "```"])

    def picture(self, name: str, svg: str) -> None:
        (self.out / f"{name}.svg").write_text(svg)

    def draw(self, command: str, name: str) -> str:
        """Run a command that draws with --out, keep its picture, and return what it printed."""
        if self.printed is not None:
            self.picture(name, self.printed(f"{command} --out {name}.svg >printed; cat {name}.svg"))
            return ""
        printed = self.run(f"{command} --out {name}.svg")
        self.commands.pop()
        self.picture(name, (self.folder / f"{name}.svg").read_text())
        return printed

    def _write(self, name: str, lines: Sequence[str]) -> None:
        head = f"<!-- Made by: python docs/build.py {'' if self.printed else '--measure '}{self.page} -->"
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
    own = {"PATH": path, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": ""}
    return {**os.environ, **MORE_RANKS_THAN_CORES, **own}

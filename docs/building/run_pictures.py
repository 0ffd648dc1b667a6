"""Draw what a run shows: python docs/building/run_pictures.py NAME --out FILE.

Each is measured, by the commands beside it in docs/gallery.md. Under `python docs/build.py --measure gallery`
more ranks than cores share them.
"""

import argparse
import html
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
COLUMNS = 118
LINE, CHARACTER, MARGIN = 17, 7.25, 14
NO_BREAK = "\N{NO-BREAK SPACE}"  # viewers show several spaces as one
TINY = str(ROOT / "jobs" / "tiny.toml")


def run(*words: str) -> subprocess.CompletedProcess:
    """Run a command of this environment in a folder of its own; what it prints comes back as text."""
    with tempfile.TemporaryDirectory() as folder:
        command = [BIN / words[0], *words[1:]]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def terminal(command: str, lines: list[str]) -> str:
    """Return what a terminal shows of a command as SVG, on a dark ground."""
    shown = [f"$ {command}", *(part for line in lines for part in folded(line))]
    width = MARGIN * 2 + CHARACTER * max(map(len, shown))
    height = MARGIN * 2 + LINE * len(shown)
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * number + 12}" fill="{color(line)}" '
        f'textLength="{CHARACTER * len(line):.0f}">{html.escape(line).replace(" ", NO_BREAK)}</text>'
        for number, line in enumerate(shown)
        if line
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
        f'height="{height}" font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="12" '
        f'><rect width="100%" height="100%" rx="6" fill="#1e2430"/>\n' + "\n".join(rows) + "\n</svg>\n"
    )


def color(line: str) -> str:
    """Return the colour of a line: of a command, of a message, of other text."""
    return "#9ecbff" if line.startswith("$ ") else "#ffd479" if line.startswith("mpitrain:") else "#dfe5ee"


def folded(line: str) -> Iterator[str]:
    """Yield a line in pieces that fit the picture."""
    while len(line) > COLUMNS:
        cut = line.rfind(" ", 0, COLUMNS)
        yield line[:cut]
        line = "    " + line[cut + 1 :]
    yield line


def without_dates(text: str) -> list[str]:
    """Return the lines of a log without date and time, which every run has others of."""
    return [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +", "", line) for line in text.splitlines()]


def first_run() -> str:
    """What the first run leaves: its losses, and what communication cost."""
    with tempfile.TemporaryDirectory() as folder:
        command = [BIN / "mpirun", "-n", "2", BIN / "mpitrain", "run"]
        subprocess.run(command, cwd=folder, capture_output=True)
        return Path(folder, "runs", "quickstart", "run.svg").read_text()


def report() -> bytes:
    """The page of a run of 8 ranks with experts, as a browser shows it. Needs bokeh and chromium."""
    sys.path.append(str(ROOT / "tests" / "support"))
    from browser import page_in_browser

    mixtral = str(ROOT / "jobs" / "tiny-mixtral.toml")
    keys = ("parallel.pp=2", "parallel.ep=2", "run.steps=40", "run.eval_every=10")
    words = [word for key in keys for word in ("--set", key)]
    with tempfile.TemporaryDirectory() as folder:
        for command in (
            [BIN / "mpirun", "-n", "8", BIN / "mpitrain", "run", mixtral, *words, "--set", "run.trace=2",
             "--set", "run.dir=my"],
            [BIN / "mpitrain", "report", "my"],
        ):  # fmt: skip
            subprocess.run(command, cwd=folder, capture_output=True)
        picture = Path(folder) / "report.png"
        with page_in_browser(Path(folder) / "profile", 1280) as page:
            page.open((Path(folder) / "report.html").as_uri())
            page.screenshot(picture, 2400)
        return picture.read_bytes()


def dispatch() -> str:
    """What of the dispatch of experts is hidden under computation, with 1f1b and with dualpipev."""
    shown = []
    for name in ("1f1b", "dualpipev"):
        words = ["--set", f"pipeline.schedule={name}", "--set", "parallel.ep=2", "--set", "run.steps=12"]
        mixtral = str(ROOT / "jobs" / "tiny-mixtral.toml")
        done = run("mpirun", "-n", "2", "mpitrain", "run", mixtral, *words, "--set", "parallel.pp=1")
        rows = [line for line in done.stdout.splitlines() if line.startswith(("  axis", "  experts "))]
        shown += [f"pipeline.schedule = {name}", *rows[:2], ""]
    return terminal("mpirun -n 2 mpitrain run jobs/tiny-mixtral.toml --set parallel.ep=2", shown)


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes that a process has started, and those that these have."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from descendants(int(child))


def ranks_of(job: subprocess.Popen) -> list[int]:
    """Return the processes of the ranks of a job, in the order of their numbers."""
    return sorted(pid for pid in descendants(job.pid) if _has_rank(pid))


def _has_rank(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return command[1:2] == [os.fsencode(BIN / "mpitrain")]


def disturbed(disturb: Callable[[subprocess.Popen, Path], None], *words: str) -> list[str]:
    """Start a job, disturb it when it trains, and return what it has printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [BIN / "mpirun", "-n", "2", BIN / "mpitrain", "run", TINY, *words]
        log = Path(folder) / "log"
        with open(log, "w") as out:
            job = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, start_new_session=True)
        try:
            while "step " not in log.read_text() and job.poll() is None:
                time.sleep(0.2)
            disturb(job, log)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGTERM)
            job.wait()
        return without_dates(log.read_text())


def hang() -> str:
    """The report of a hang: a rank that is stopped."""

    def stop(job: subprocess.Popen, _: Path) -> None:
        os.kill(ranks_of(job)[-1], signal.SIGSTOP)
        job.wait(120)

    words = "--set parallel.pp=2 --set comm.timeout_s=5 --set run.steps=100000"
    lines = [line for line in disturbed(stop, *words.split()) if line.startswith(("mpitrain:", "  rank"))]
    return terminal(f"mpirun -n 2 mpitrain run jobs/tiny.toml {words}", lines)


def straggler() -> str:
    """A slow rank is named: one that is stopped for a fifth of a second, again and again."""

    def slow_down(job: subprocess.Popen, log: Path) -> None:
        rank = ranks_of(job)[-1]
        end = time.monotonic() + 90
        while time.monotonic() < end and "is slow" not in log.read_text():
            os.kill(rank, signal.SIGSTOP)
            time.sleep(0.4)
            os.kill(rank, signal.SIGCONT)
            time.sleep(0.2)

    words = "--set comm.slow_after=20 --set run.steps=100000"
    lines = [line for line in disturbed(slow_down, *words.split()) if "is slow" in line]
    return terminal(f"mpirun -n 2 mpitrain run jobs/tiny.toml {words}", lines)


DRAWN: dict[str, Callable[[], str | bytes]] = {
    "run": first_run,
    "report": report,
    "dispatch": dispatch,
    "hang": hang,
    "straggler": straggler,
}


def main() -> None:
    """Draw one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=DRAWN)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    drawn = DRAWN[asked.name]()
    asked.out.write_bytes(drawn if isinstance(drawn, bytes) else drawn.encode())


if __name__ == "__main__":
    main()

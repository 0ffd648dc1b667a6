"""Plant a bug in each module, one at a time, in a copy, and tell which test finds it first.

    python benchmarks/planted_bugs.py                      all of them, an hour on two cores
    python benchmarks/planted_bugs.py schedules optim/     those in files whose path holds one of the words
    python benchmarks/planted_bugs.py --all optim/norm     not only the first: every test file that finds it
    python benchmarks/planted_bugs.py --after FILE         other than planted_bugs.txt, what this printed last

The bugs stand in planted_bugs.toml. Who found a bug in the study before is asked first, then the tests of
the bug's room in the order of what they cost: in one process, then under mpirun on 1, 2 and 4 ranks, then
whole runs of the program. A bug that none of them finds is printed with `nothing`: a test is missing, or
the code is.

The copy is found by PYTHONPATH, before what is installed. Limits are in wall time: run it where nothing
else runs.
"""

import argparse
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import pytest  # noqa: E402
from launch import started  # noqa: E402
from preload import LIBRARIES, WHAT  # noqa: E402

FOUND = Path(__file__).with_suffix(".txt")
LIMIT_S = {
    "one process": 200,
    "1 rank": 600,
    "2 ranks": 600,
    "4 ranks": 600,
    "runs": 900,
}  # who takes longer has found it: it hangs

PLANTED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
BUGS = [(bug["file"], bug["old"], bug["new"]) for bug in PLANTED["bug"]]


class Copy:
    """A copy of the tree, in which a bug can be planted."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._writes = 1_000_000_000
        for part in ("mpitrain", "comm", "schedules", "jobs", "tests", "benchmarks"):
            shutil.copytree(
                ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        for part in ("setup.cfg", "pyproject.toml", "README.md"):
            shutil.copy(ROOT / part, folder)

    def asked(self, file: str) -> list[Path]:
        """Return the test files that are asked about a bug in `file`, each once, in order."""
        rooms = PLANTED["asked"]
        room = max((room for room in rooms if file.startswith(room)), key=len)
        found = [
            path
            for name in rooms[room].split()
            for path in sorted((self.folder / "tests").rglob(f"test_{name}.py"))
        ]
        return list(dict.fromkeys(found))

    def judge(self, files: list[Path], every: bool) -> list[str]:
        """Return the tests that fail, the first only or the first of each file, and how they were started."""
        found = []
        runs = [path for path in files if path.name.startswith("test_run_")]
        single = [path for path in files if path not in runs]
        under_mpi = [path for path in single if "pytest.mark.mpi" in path.read_text(encoding="utf-8")]
        for how, files in (
            ("one process", single),
            ("1 rank", under_mpi),
            ("2 ranks", under_mpi),
            ("4 ranks", under_mpi),
            ("runs", runs),
        ):
            for some in [[path] for path in files] if every else [files] * bool(files):
                found += [f"{test} ({how})" for test in self._failing(how, some)]
                if found and not every:
                    return found
        return found

    def still_found(self, finder: str) -> list[str]:
        """Ask the test that found a bug before, with how it was started, as judge() returns it."""
        name, _, how = finder.rpartition(" (")
        path, _, test = name.partition("::")
        path = next((self.folder / "tests").rglob(path), None)
        if path is None or (test and f"def {test.split('[')[0]}(" not in path.read_text(encoding="utf-8")):
            return []
        chosen = ["-k", test.split("[")[0]] if test else []
        return [f"{test} ({how}" for test in self._failing(how.rstrip(")"), [path], *chosen)]

    def plant(self, file: str, text: str) -> None:
        """Write a module, with a time of its own: what Python has compiled of it is then old."""
        self._writes += 1
        (self.folder / file).write_text(text, encoding="utf-8")
        os.utime(self.folder / file, (self._writes, self._writes))

    def _forked(self, options: list[str]) -> tuple[int | None, str]:
        """Run pytest in a child that finds torch and others loaded.

        Return its exit code, None if it hangs, and what it said.
        """
        for name in ("h5py", "hypothesis", "numpy", "torch"):
            importlib.import_module(name)
        with tempfile.TemporaryFile("w+") as output:
            child = os.fork()
            if not child:
                os.setsid()
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.chdir(self.folder)
                os.environ["PYTHONPATH"] = str(self.folder)
                sys.path.insert(0, str(self.folder))
                code = pytest.main(options)
                sys.stdout.flush()
                os._exit(code)
            end = time.monotonic() + LIMIT_S["one process"]
            while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
                time.sleep(0.02)
            if not ended[0]:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(ended[1]) if ended[0] else None
            output.seek(0)
            return code, output.read()

    def _failing(self, how: str, files: list[Path], *chosen: str) -> list[str]:
        num_ranks = int(how.split()[0]) if " rank" in how else 0
        options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", *chosen, *map(str, files)]
        if num_ranks:
            script = self.folder / "tests" / "support" / "lane.py"
            lane = (sys.executable, str(script), "--only-mpi", *options)
            with started(num_ranks, *lane, env={"PYTHONPATH": str(self.folder)}, cwd=self.folder) as job:
                done = job.wait(LIMIT_S[how])
            code = done.returncode
            text = done.output
        else:
            code, text = self._forked(options)
        if code in (0, 5):  # 5: nothing to run
            return []
        named = re.findall(r"^(?:FAILED|ERROR) (?:tests/\S*/)?(test_\S+)", text, re.M) or re.findall(
            r"(test_\w+\.py::\S+) failed on rank", text
        )
        return named[:1] or [f"{files[0].name}: {'hangs' if code is None else 'ends'}"]


def finders(output: Path) -> dict[tuple[str, str], str]:
    """Return {(module, what was put there): who found it first}, of what main() has printed."""
    pairs = re.findall(
        r"^(\S+): (.*)\n    (.*?)(?:;.*)?  \[\d+ s\]$", output.read_text(encoding="utf-8"), re.M
    )
    return {(file, new): found for file, new, found in pairs if found != "nothing"}


def place_of(old: str, text: str) -> tuple[int, int]:
    """Return where code begins and ends in a file, however its lines are broken; it is there once."""
    tokens = re.findall(r"\w+|[^\w\s]", old)
    closing = {")", "]", "}"}
    words = [(r"\s*,?\s*" if token in closing else r"\s*") + re.escape(token) for token in tokens]
    found = [text.find(old)] if text.count(old) == 1 else []
    if found:
        return found[0], found[0] + len(old)
    found = [match.span() for match in re.finditer("".join(words), text)]
    if len(found) != 1:
        raise LookupError(f"{old!r} is there {len(found)} times")
    begins, ends = found[0]
    return begins + len(text[begins:ends]) - len(text[begins:ends].lstrip()), ends


def main() -> None:
    """Plant one bug after the other; what runs by choice only may find it, too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of the paths of modules; all if none is given")
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument(
        "--all", action="store_true", help="every test file that finds a bug, not only the first"
    )
    asked.add_argument("--after", type=Path, metavar="FILE", default=FOUND, help="what this printed before")
    parser.add_argument("--tests", help="ask these test files only, as in 'run_* train_zero'")
    given = parser.parse_args()
    before = {} if given.all or given.tests else finders(given.after)
    os.environ[WHAT] = LIBRARIES
    os.environ["MPITRAIN_EFFORT"] = "long"
    with tempfile.TemporaryDirectory(prefix="mpitrain-planted-") as folder:
        copy = Copy(Path(folder))
        for file, old, new in BUGS:
            if given.words and not any(word in file for word in given.words):
                continue
            path = copy.folder / file
            begin = time.monotonic()
            text = path.read_text(encoding="utf-8")
            begins, ends = place_of(old, text)
            files = copy.asked(file)
            if given.tests:
                files = [
                    path
                    for name in given.tests.split()
                    for path in sorted((copy.folder / "tests").rglob(f"test_{name}.py"))
                ]
            copy.plant(file, text[:begins] + new + text[ends:])
            finder = before.get((file, " ".join(new.split())))
            found = (finder and copy.still_found(finder)) or copy.judge(files, given.all)
            copy.plant(file, text)
            print(
                f"{file}: {' '.join(new.split())}\n"
                f"    {'; '.join(found) or 'nothing'}  [{time.monotonic() - begin:.0f} s]",
                flush=True,
            )


if __name__ == "__main__":
    main()

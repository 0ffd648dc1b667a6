"""Storage that fails: a command is run in forked children, and in each of them another call fails.

    python storage_faults.py FOLDER STRIDE ERRNO [--every] WORD...

It is started with storage_faults.so as LD_PRELOAD, in FOLDER, which holds what the command needs.
Every rename and sync fails once, and every STRIDE-th of the other calls. A line of JSON for each: the exit
codes, what was printed, what lay there, and the same of the command once more, undisturbed.
"""

import ctypes
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from launch import environment

NAMES, SYNC, DATA = 1, 2, 4  # kinds of calls, as storage_faults.c has them
COMMANDS = ("commands.ckpt.maintenance", "checkpoint.reshard", "weights.exporting", "weights.importing")
SOURCE = Path(__file__).with_suffix(".c")


def built(folder: Path) -> Path:
    """Compile the library."""
    library = folder / "storage_faults.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


def walked(library: Path, folder: Path, stride: int, error: int, *words: str) -> list[dict]:
    """Return what each failing call led to; the first one is of the command without a fault."""
    command = [sys.executable, __file__, str(folder), str(stride), str(error), *words]
    env = environment(LD_PRELOAD=str(library))
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


class Walk:
    """A command, and the folder it runs in, which is as it was before each attempt."""

    def __init__(self, folder: Path, words: list[str]):
        self.folder = folder
        self.words = words
        self.library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self.kept = Path(tempfile.mkdtemp()) / "kept"
        shutil.copytree(folder, self.kept)

    def reset(self) -> None:
        for name in os.listdir(self.folder):
            shutil.rmtree(self.folder / name)
        shutil.copytree(self.kept, self.folder, dirs_exist_ok=True)

    def attempt(self, kinds: int = 0, call: int = 0, error: int = 0) -> dict:
        """Run the command in a fork whose call of these kinds fails."""
        given, taken = os.pipe()
        with tempfile.TemporaryFile(dir=self.kept.parent) as out:
            pid = os.fork()
            if pid == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                self.library.storage_faults_arm(kinds, call, error, str(self.folder).encode())
                code = run(self.words)
                os.write(taken, json.dumps([code, self.library.storage_faults_count()]).encode())
                os._exit(0)
            os.close(taken)
            with open(given) as file:
                code, count = json.loads(file.read() or "[-1, 0]")
            os.waitpid(pid, 0)
            out.seek(0)
            text = out.read().decode()
        return {"code": code, "text": text, "calls": count, "left": tree(self.folder)}

    def report(self, **how: int) -> None:
        self.reset()
        found = self.attempt(**how)
        again = self.attempt() if found["code"] else found
        print(json.dumps(how | found | {"again": again["code"], "then": again["left"]}), flush=True)


def run(words: list[str]) -> int:
    from mpitrain.cli import main

    sys.argv = ["mpitrain", *words]
    try:
        main()
    except SystemExit as end:
        return end.code
    except BaseException as error:
        sys.__excepthook__(type(error), error, error.__traceback__)
        sys.stderr.flush()
    return 99


def main() -> None:
    for name in COMMANDS:  # once: forks have them
        importlib.import_module(f"mpitrain.{name}")
    folder, stride, error, *words = sys.argv[1:]
    walk = Walk(Path(folder), words)
    walk.report()
    for kinds, step in ((SYNC, 1), (NAMES | DATA, int(stride))):
        walk.reset()
        for call in range(step, walk.attempt(kinds)["calls"] + 1, step):
            walk.report(kinds=kinds, call=call, error=int(error))


if __name__ == "__main__":
    main()

"""Commands in a stranger's folder: a module of each name that Python can import lies there, and none is run.

MPITRAIN_EFFORT=long takes every command. A trap writes down its name, and what imported it.
"""

import ast
import importlib.metadata
import importlib.util
import os
import shutil
import sys

import pytest
from conftest import LONG
from folders import ROOT
from launch import MPITRAIN, mpirun, tail

TRAP = "open({log!r}, 'a').write({name!r} + ' in ' + open('/proc/self/cmdline').read()[:500] + chr(10))\n"
CUSTOM = "sitecustomize", "usercustomize", "comm", "schedules"
TRANSFORMERS = importlib.util.find_spec("transformers") is not None
SMALL = "--set", "model.layers=2", "--set", "model.width=32", "--set", "model.heads=2"
TWO = *SMALL, "--ranks", "2", "--set", "parallel.pp=2"
ONLY_INTERPRETER = "comm/base/interpreter.py"
# start `python -c` without asking
STARTS_PYTHON = "multiprocessing", "concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process"
SUSPECT = "executable", "multiprocessing", "concurrent"


def plant(folder):
    """Fill a folder with traps: every second name is a package, which Python prefers to a file."""
    log = folder / "trapped.log"
    others = importlib.metadata.packages_distributions()
    names = sorted({*sys.stdlib_module_names, *others, *CUSTOM, "mpitrain"})
    for number, name in enumerate(names):
        path = folder / f"{name}.py" if number % 2 else folder / name / "__init__.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(TRAP.format(log=str(log), name=name))
    return log


def require_free(log, num_ranks, *command, cwd):
    done = mpirun(num_ranks, *command, cwd=cwd, forked=False, timeout=180)
    assert not log.exists(), f"{command}: {log.read_text()}"
    # bench machine says with 1 that others used the cores meanwhile
    wanted = 1 if "disturbed" in done.output.partition("\n")[0] else 0
    assert done.returncode == wanted, f"{command}: {tail(done.output)}"


def test_a_trap_works(tmp_path):
    log = plant(tmp_path)
    mpirun(0, sys.executable, "-c", "import json", cwd=tmp_path)
    assert "json in" in log.read_text()


def test_what_a_run_starts_imports_nothing_of_the_current_folder(tmp_path):
    log = plant(tmp_path)
    given = *SMALL, "--set", "run.steps=1"
    require_free(log, 2, MPITRAIN, "run", *given, cwd=tmp_path)


@pytest.mark.parametrize("through", [(), ("-m", "mpi4py")], ids=["mpitrain", "mpi4py"])
def test_python_m_takes_the_current_folder_off_its_path(through, tmp_path):
    """What Python itself imports before it has found the program can't be helped, nor mpi4py's."""
    log = plant(tmp_path)
    shutil.rmtree(tmp_path / "mpitrain", ignore_errors=True)
    code = "import sys; sys.argv[1:] = []; import mpi4py.run, runpy, pkgutil; print(*sys.modules)"
    early = mpirun(0, sys.executable, "-P", "-c", code, cwd=tmp_path).output.split()
    for name in {"mpitrain", *(word.partition(".")[0] for word in early)}:
        (tmp_path / f"{name}.py").unlink(missing_ok=True)
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    require_free(log, 0, sys.executable, *through, "-m", "mpitrain", "plan", *TWO, cwd=tmp_path)


def test_matplotlibrc_of_the_current_folder_changes_no_picture(tmp_path):
    """As a style it would have LaTeX called, as a FIFO be waited for."""
    rc, out = tmp_path / "matplotlibrc", tmp_path / "grid.svg"
    draw = MPITRAIN, "schedule", "gpipe", "--stages", "2", "--microbatches", "2", "--out", str(out)
    pictures = []
    for style in (b"", b"text.usetex: True\nbackend: module://evil\nsavefig.dpi: 9999\n\x1b[31m: 1\n"):
        rc.write_bytes(style)
        done = mpirun(0, *draw, cwd=tmp_path)
        assert done.returncode == 0 and "\x1b" not in done.output, done.output
        pictures.append(out.read_bytes())
    assert pictures[0] == pictures[1]
    rc.write_bytes(b"\xff")
    done = mpirun(0, *draw, cwd=tmp_path)
    assert done.returncode == 2 and "isn't UTF-8" in done.output, done.output
    rc.unlink()
    os.mkfifo(rc)
    done = mpirun(0, *draw, cwd=tmp_path)
    assert done.returncode == 2 and "it is a FIFO" in done.output, done.output


COMMANDS = [
    (2, "doctor"),
    (0, "doctor"),
    (2, "run", *SMALL, "--set", "run.steps=2"),
    (2, "run", *SMALL, "--set", "run.steps=2", "--set", "run.compile=true", "--set", "run.dir=runs/compiled"),
    (2, "run", *SMALL, "--dry-run", "--set", "run.dir=runs/dry"),
    (
        2,
        "run",
        *SMALL,
        "--set",
        "model.family=mixtral",
        "--set",
        "run.dir=runs/experts",
        "--set",
        "run.steps=1",
    ),
    (0, "generate", "runs/quickstart", "--prompt", "def ", "--tokens", "3"),
    (0, "plan", *TWO, "--timeline", "step.svg"),
    (2, "plan", *SMALL, "--measure", "2"),
    (0, "program", *TWO),
    (0, "check", *TWO),
    (0, "memory", *TWO),
    (0, "verify", "--layout", "pp=2"),
    (0, "schedule", "1f1b", "--stages", "4", "--microbatches", "8", "--out", "grid.svg"),
    (2, "sweep", *SMALL, "--layout", "parallel.pp=2", "--layout", "parallel.dp=2", "--svg", "sweep.svg"),
    (2, "bench", "machine", "--out", "machine.toml"),
    (0, "config"),
    (0, "ckpt", "inspect", "runs/quickstart"),
    (0, "ckpt", "verify", "runs/quickstart"),
    (0, "ckpt", "diff", "runs/quickstart", "runs/quickstart"),
    (0, "ckpt", "reshard", "runs/quickstart", "resharded", "--shards", "2"),
    (0, "job", "slurm", "--nodes", "2", "--time", "1:00:00", "--out", "job.sh"),
    (0, "export", "runs/quickstart", "--to", "hf", "--prove" if TRANSFORMERS else "--no-prove"),
    (0, "import", "hf", "--to", "runs/imported"),
]


@LONG
def test_no_command_imports_anything_of_the_current_folder(tmp_path):
    log = plant(tmp_path)
    for num_ranks, *words in COMMANDS:
        require_free(log, num_ranks, MPITRAIN, *words, cwd=tmp_path)


def test_one_place_makes_the_command_of_a_python_child():
    """Elsewhere sys.executable is only named in messages, or beside it lies something that is looked for."""
    for room in ("comm", "schedules", "mpitrain"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.relative_to(ROOT).as_posix() == ONLY_INTERPRETER:
                continue
            text = path.read_text()
            if not any(word in text for word in SUSPECT):  # a walk over all files takes seconds
                continue
            tree = ast.parse(text)
            allowed = {id(use) for node in ast.walk(tree) if _only_named(node) for use in ast.walk(node)}
            found = [node.lineno for node in ast.walk(tree) if _interpreter(node) and id(node) not in allowed]
            assert not found, f"{path}:{found}: a child is started by {ONLY_INTERPRETER}"
            started = [node.lineno for node in ast.walk(tree) if _starts_python(node)]
            assert not started, f"{path}:{started}: starts Python with the current folder on its path"


def _interpreter(node):
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.executable", "sys._base_executable")


def _only_named(node):
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Call) and ast.unparse(node.func) == "Path"
    )


def _starts_python(node):
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom):
        names += [f"{node.module}.{alias.name}" for alias in node.names]
    return any(name == each or name.startswith(f"{each}.") for name in names for each in STARTS_PYTHON)

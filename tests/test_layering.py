"""The map of the house: who may import whom. Every arrow between rooms points down FLOORS, so there is no circle."""

import ast
import configparser
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpitrain

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"schedules": {"torch", "numpy", "mpi4py"}, "comm": {"torch"}}
FLOORS = {  # from the roof to the ground: a room imports rooms further down only
    "cli": "the command line",
    "commands": "what each command does, but for run",
    "training": "a run: what is settled before it, its loop, what it says, what it saves",
    "actor": "one rank: walks its program over its stages, sums gradients, updates",
    "model": "layers and families, what computes them, recomputation and offloading",
    "optim": "one file an optimiser, what it keeps, norms, rates, loss scale",
    "parallel": "walks of local segments and communications; context/; tensor_overlap; zero/: weights and gradients in shards",
    "checkpoint": "the model and the optimiser in HDF5 files",
    "cluster": "this job on its nodes: guard and watchdog of each rank, run directory and lock, launcher",
    "layout": "what a configuration means, in integers: who holds, computes and sends what",
    "data": "corpora, tokenizers, tokens and their order",
    "config": "typed keys",
    "inputs": "what others wrote, read with limits",
    "comm": "MPI: mesh, collectives, links, transports",
    "schedules": "tables of instructions: families, lowering, proof, simulator",
    "errors": "every error a user can see",
}
MOST_ROOMS = 14  # in mpitrain/: folders and files


def imported_names(path: Path) -> list[str]:
    """Return the dotted name of every import in a file, relative ones resolved within its package."""
    package = f"mpitrain.{path.parent.name}" if path.parent.name in HEAVY else "mpitrain"
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module
            names += [f"{module}.{alias.name}" for alias in node.names]
    return names


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("package", HEAVY)
def test_importing_is_light(package):
    """Import every module of the package in a fresh process, and look at what came along."""
    modules = [f"mpitrain.{package}"] + [f"mpitrain.{package}.{m.name}" for m in pkgutil.iter_modules([str(ROOT / package)])]
    code = f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert not HEAVY[package] & set(run.stdout.split())


def test_a_plan_is_made_without_torch_and_without_mpi():
    """Of `layout` all of it; of `model` what layers and families declare. They are imported, and a memory table is computed."""
    folders = [ROOT / "mpitrain/layout", ROOT / "mpitrain/model/layers", ROOT / "mpitrain/model/families"]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for folder in folders for path in folder.glob("*.py")]
    code = f"import sys, importlib\nfor name in {names}: importlib.import_module(name)\n"
    code += "from mpitrain.commands.inspect import show_memory\nshow_memory(None, ('parallel.pp=2', 'parallel.zero=3'), 8)\n"
    code += "print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert not {"torch", "mpi4py.MPI"} & set(run.stdout.split())


def room_of(path: Path, root: Path) -> str:
    """Return the room of a file: a folder or a file of mpitrain/, or one of the two on the top level."""
    top, *rest = path.relative_to(root).parts
    return rest[0].removesuffix(".py") if top == "mpitrain" else top


def wrong_arrows(root: Path) -> Iterator[str]:
    """Yield the imports of a tree that don't point down, late ones within functions included."""
    floors = list(FLOORS)
    for path in sorted(file for top in ("mpitrain", *HEAVY) for file in (root / top).rglob("*.py")):
        room = room_of(path, root)
        for name in imported_names(path):
            ours, _, rest = name.partition(".")
            target = rest.partition(".")[0]
            if ours != "mpitrain" or target in ("", room, "__version__"):
                continue
            if floors.index(target) <= floors.index(room):
                yield f"{path.relative_to(root)} imports {name}: {room} is no floor above {target}"


def test_every_import_points_down():
    assert list(wrong_arrows(ROOT)) == []


@pytest.mark.parametrize("package", HEAVY)
def test_schedules_and_comm_know_nothing_but_errors(package):
    names = {name for path in files(package) for name in imported_names(path) if name.startswith("mpitrain.")}
    assert {name.split(".")[1] for name in names} == {package, "errors"}


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        ("mpitrain/layout/traffic.py", "from mpitrain.parallel import walk"),
        ("mpitrain/data/split.py", "def late():\n    import mpitrain.layout.resolve"),
        ("comm/wire.py", "from mpitrain.inputs import shown"),
        ("schedules/gpipe.py", "from mpitrain import config"),
    ],
)
def test_an_import_that_points_up_is_found(tmp_path, file, planted):
    for top in ("mpitrain", *HEAVY):
        shutil.copytree(ROOT / top, tmp_path / top, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / file
    path.write_text(f"{path.read_text()}\n{planted}\n")
    (found,) = wrong_arrows(tmp_path)
    assert found.startswith(f"{file} imports ")


def importers_of_mpi(root: Path) -> Iterator[str]:
    """Yield the files outside comm/ that import mpi4py, late imports within functions included."""
    for path in sorted(file for top in ("mpitrain", "schedules") for file in (root / top).rglob("*.py")):
        if any(name.split(".")[0] == "mpi4py" for name in imported_names(path)):
            yield str(path.relative_to(root))


def test_mpi_is_called_in_comm_only():
    assert list(importers_of_mpi(ROOT)) == []


@pytest.mark.parametrize("planted", ["import mpi4py.MPI as m", "from mpi4py import MPI", "def late():\n    from mpi4py.MPI import Comm"])
def test_a_call_of_mpi_outside_of_comm_is_found(tmp_path, planted):
    for top in ("mpitrain", *HEAVY):
        shutil.copytree(ROOT / top, tmp_path / top, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "mpitrain/training/checks/ledger.py"
    path.write_text(f"{path.read_text()}\n{planted}\n")
    assert list(importers_of_mpi(tmp_path)) == ["mpitrain/training/checks/ledger.py"]


def test_only_connect_starts_mpi():
    """A command that sends nothing may run where MPI can't be started, and a rank is guarded before it is."""
    modules = [f"mpitrain.comm.{module.name}" for module in pkgutil.iter_modules([str(ROOT / "comm")])]
    code = f"import importlib\nfor name in {modules}: importlib.import_module(name)\nfrom mpi4py import MPI\nprint(MPI.Is_initialized())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n", run.stdout + run.stderr


def test_few_rooms_and_each_on_the_map():
    rooms = {path.name.removesuffix(".py") for path in (ROOT / "mpitrain").iterdir() if not path.name.startswith("__")}
    assert rooms | set(HEAVY) == set(FLOORS)
    assert len(rooms) <= MOST_ROOMS


def test_a_run_is_opened_without_torch():
    """A wrong configuration is refused before all ranks load it."""
    code = "import sys, mpitrain.training.opening; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_nobody_imports_the_bare_packages():
    """`import comm` works from the repository root, gives a second copy of the module, and hides Jupyter's comm."""
    for folder in ("schedules", "comm", "mpitrain", "tests"):
        for path in files(folder):
            wrong = [name for name in imported_names(path) if name.split(".")[0] in HEAVY]
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_package_init_holds_only_the_version():
    """It runs before every submodule, on every rank."""
    (assignment,) = ast.parse(Path(mpitrain.__file__).read_text()).body
    assert [target.id for target in assignment.targets] == ["__version__"]


def test_every_package_is_installed():
    """An editable install finds a folder that setup.cfg forgets; a normal one doesn't."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "mpitrain").rglob("__init__.py")}
    assert folders | {"mpitrain.comm", "mpitrain.schedules", "mpitrain.jobs"} == set(setup["options"]["packages"].split())

"""The map of the house: who may import whom.

Every arrow between rooms points down FLOORS, so there is no circle.
"""

import ast
import configparser
import itertools
import os
import pkgutil
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from folders import ROOT
from launch import finished

import mpitrain

HEAVY = {"schedules": {"torch", "numpy", "mpi4py"}, "comm": {"torch"}}
FLOORS = {  # from the roof to the ground: a room imports rooms further down only
    "api": "a run from a script: open it, step it, read its state",
    "cli": "the command line",
    "commands": "what each command does, but for run",
    "generation": "text from a checkpoint: logits of the next token, and which one it is",
    "measuring": "a machine, measured by its ranks: processors, links, storage, environment",
    "dryrun": "a dry run's ranks, which send all and compute nothing",
    "training": "a run: what is settled before it, its loop, what it says, what it saves",
    "evaluation": "what weights are worth: loss of texts, answers to tasks, on any layout",
    "weights": "weights in and out: Hugging Face folders to checkpoints and runs, and back, with a proof",
    "planner": "layouts by predicted time and memory, predictions beside steps",
    "actor": "one rank: walks its program over its stages, sums gradients, updates",
    "model": "layers and families, what computes them, recomputation and offloading",
    "optim": "one file an optimiser, what it keeps, norms, rates, loss scale",
    "parallel": "walks of local segments and communications; context/; async_tp; zero/: weights and "
    "gradients in shards",
    "kernels": "pure computation on tensors: attention, products, norms, gates, cross-entropy",
    "checkpoint": "the model and the optimiser in HDF5 files",
    "report": "pages of runs: reads run directories, nothing else",
    "cluster": "this job on its nodes: guard and watchdog of each rank, run directory and lock, launcher",
    "plan": "what a configuration means, in integers: who holds, computes and sends what",
    "data": "corpora, tokenizers, tokens and their order",
    "config": "typed keys",
    "origins": "where the value of each key comes from",
    "plugins": "code of the user's own that a configuration names",
    "config_hints": "what people type instead of keys and TOML",
    "inputs": "what others wrote, read with limits",
    "comm": "MPI: mesh, collectives, links, transports",
    "schedules": "tables of instructions: families, lowering, proof, simulator",
    "errors": "every error a user can see",
}
MOST_ROOMS = 26  # in mpitrain/: folders and files
# Within these rooms: folders and files, from the top down. What stands in one line knows nothing of its
# neighbours there.
WITHIN = {
    "schedules": [
        "time_and_memory",
        "auto_choice",
        "played",
        "catalog",
        "formats",
        "proof",
        "play",
        "lowering",
        "families",
        "search",
        "family",
        "table pairs",
        "limits options",
        "actions search_progress",
    ],
    "comm": [
        "standins",
        "mesh collectives links prediction",
        "axis",
        "transports",
        "device",
        "tap",
        "progress",
        "meters",
        "base",
    ],
    "plan": [
        "predict",
        "plan",
        "axes",
        "settings",
        "activations",
        "routing_file",
        "program routing",
        "division",
        "declared",
    ],
}


def imported_names(path: Path) -> list[str]:
    """Return the dotted name of every import in a file; none is relative."""
    names = names_in(path.read_text())
    assert None not in names, f"{path}: a relative import"
    return names


@cache  # copies of the tree have nearly all texts in common
def names_in(source: str) -> list[str | None]:
    """Return the dotted name of every import, None for a relative one."""
    names: list[str | None] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [None if node.level else f"{node.module}.{alias.name}" for alias in node.names]
    return names


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def modules_of(package: str) -> list[str]:
    """Return the names of a package and of all modules in it."""
    found = pkgutil.walk_packages([str(ROOT / package)], f"mpitrain.{package}.")
    return [f"mpitrain.{package}", *(module.name for module in found)]


@pytest.mark.parametrize("package", HEAVY)
def test_importing_is_light(package):
    """Import every module of the package in a fresh process, and look at what came along."""
    modules = modules_of(package)
    code = f"import sys, importlib\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    run = finished([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert not HEAVY[package] & set(run.stdout.split())


def test_a_plan_is_made_without_torch_and_without_mpi():
    """Of `plan` all of it; of `model` what layers and families declare, and what optimisers do.

    They are imported, and a memory table is computed.
    """
    rooms = ("plan", "model/layers", "model/families", "optim/optimizers")
    folders = [ROOT / "mpitrain" / room for room in rooms]
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for folder in folders
        for path in folder.rglob("*.py")
    ]
    code = f"import sys, importlib\nfor name in {names}: importlib.import_module(name)\n"
    code += (
        "from mpitrain.commands.inspect import show_memory\nshow_memory(None, ('parallel.pp=2', "
        "'parallel.zero=3'), 8)\n"
    )
    code += "print(*sys.modules)"
    run = finished([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert not {"torch", "mpi4py.MPI"} & set(run.stdout.split())


def copied(top: str, folder: Path) -> None:
    """Copy a part of the tree; links stay links."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / top, folder / top, symlinks=True, ignore=ignored)


def room_of(path: Path, root: Path) -> str:
    """Return the room of a file: a folder or a file of mpitrain/, or one of the two on the top level."""
    top, *rest = path.relative_to(root).parts
    room = rest[0].removesuffix(".py") if top == "mpitrain" else top
    return "cli" if room == "__main__" else room


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


def place_within(parts: Sequence[str]) -> str:
    """Return which folder or file of its package a module lies in: "" for the package itself."""
    return parts[0].removesuffix(".py").replace("__init__", "") if parts else ""


def folder_of(room: str, root: Path) -> Path:
    return root / room if room in HEAVY else root / "mpitrain" / room


def wrong_arrows_within(package: str, root: Path) -> Iterator[str]:
    """Yield the imports within a room that don't point down WITHIN."""
    floors = {place: floor for floor, line in enumerate(WITHIN[package]) for place in line.split()}
    folder = folder_of(package, root)
    for path in sorted(folder.rglob("*.py")):
        here = place_within(path.relative_to(folder).parts)
        for name in imported_names(path):
            _, top, *rest = [*name.split("."), ""]
            there = place_within(rest)
            if top != package or here == there or not there:
                continue
            if not here or floors[there] <= floors[here]:
                yield f"{path.relative_to(root)} imports {name}: {here or package} is not above {there}"


@pytest.mark.parametrize("package", WITHIN)
def test_rooms_in_rooms_point_down(package):
    inside = folder_of(package, ROOT).iterdir()
    places = {place_within([path.name]) for path in inside if path.name[:2] != "__"}
    assert places | {""} == {place for line in WITHIN[package] for place in line.split()} | {""}
    assert list(wrong_arrows_within(package, ROOT)) == []


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        ("comm/base/grid.py", "from mpitrain.comm.meters.account import Account"),
        ("comm/transports/levels.py", "from mpitrain.comm import axis"),
        ("comm/links.py", "def late():\n    from mpitrain.comm.collectives import shift"),
        ("schedules/families/gpipe.py", "from mpitrain.schedules.catalog import NAMES"),
        ("schedules/lowering/lower.py", "from mpitrain.schedules.proof.check import check"),
        ("schedules/__init__.py", "from mpitrain.schedules import actions"),
        ("mpitrain/plan/division/buckets.py", "from mpitrain.plan.predict import arena"),
    ],
)
def test_an_import_that_points_up_within_a_package_is_found(tmp_path, file, planted):
    package = next(part for part in file.split("/") if part in WITHIN)
    copied(file.split("/")[0], tmp_path)
    path = tmp_path / file
    path.write_text(f"{path.read_text()}\n{planted}\n")
    (found,) = wrong_arrows_within(package, tmp_path)
    assert found.startswith(f"{file} imports ")


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts if parts[0] == "mpitrain" else ("mpitrain", *parts)).removesuffix(".__init__")


def circles(root: Path) -> set[frozenset[str]]:
    """Return the circles of files that import one another, late imports included: the files of each."""
    paths = {
        module_of(path, root): path for top in ("mpitrain", *HEAVY) for path in (root / top).rglob("*.py")
    }
    arrows = {}
    for module, path in paths.items():
        names = (name if name in paths else name.rpartition(".")[0] for name in imported_names(path))
        arrows[module] = {name for name in names if name in paths} - {module}
    found = set()
    while True:
        try:
            TopologicalSorter(arrows).prepare()
            return found
        except CycleError as error:
            circle = error.args[1]
            found.add(frozenset(str(paths[module].relative_to(root)) for module in circle))
            for here, there in itertools.pairwise(circle):
                arrows[here].discard(there)
                arrows[there].discard(here)


def test_no_circle_of_files():
    assert circles(ROOT) == set()


def test_a_circle_of_files_is_found(tmp_path):
    for top in ("mpitrain", *HEAVY):
        copied(top, tmp_path)
    path = tmp_path / "schedules/play/timeline.py"
    path.write_text(f"{path.read_text()}\ndef late():\n    from mpitrain.schedules.play import scale\n")
    (found,) = circles(tmp_path)
    assert found >= {"schedules/play/timeline.py", "schedules/play/scale.py"}


@pytest.mark.parametrize("package", HEAVY)
def test_schedules_and_comm_know_nothing_but_errors(package):
    names = {name for path in files(package) for name in imported_names(path) if name.startswith("mpitrain.")}
    assert {name.split(".")[1] for name in names} == {package, "errors"}


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        ("mpitrain/plan/declared/traffic.py", "from mpitrain.parallel import walk"),
        ("mpitrain/data/split.py", "def late():\n    import mpitrain.plan.settings.resolve"),
        ("comm/base/wire.py", "from mpitrain.inputs import shown"),
        ("schedules/families/gpipe.py", "from mpitrain import config"),
    ],
)
def test_an_import_that_points_up_is_found(tmp_path, file, planted):
    for top in ("mpitrain", *HEAVY):
        copied(top, tmp_path)
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


@pytest.mark.parametrize(
    "planted",
    ["import mpi4py.MPI as m", "from mpi4py import MPI", "def late():\n    from mpi4py.MPI import Comm"],
)
def test_a_call_of_mpi_outside_of_comm_is_found(tmp_path, planted):
    for top in ("mpitrain", *HEAVY):
        copied(top, tmp_path)
    path = tmp_path / "mpitrain/training/checks/comm_report.py"
    path.write_text(f"{path.read_text()}\n{planted}\n")
    assert list(importers_of_mpi(tmp_path)) == ["mpitrain/training/checks/comm_report.py"]


def test_only_connect_starts_mpi():
    """A command that sends nothing may run where MPI can't be started, and a rank is guarded before it is."""
    modules = modules_of("comm")
    code = (
        f"import importlib\nfor name in {modules}: importlib.import_module(name)\nfrom mpi4py import MPI\n"
        "print(MPI.Is_initialized())"
    )
    run = finished([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n", run.stdout + run.stderr


def test_few_rooms_and_each_on_the_map():
    rooms = {
        path.name.removesuffix(".py")
        for path in (ROOT / "mpitrain").iterdir()
        if not path.name.startswith("__") and not path.is_symlink()
    }
    assert rooms | set(HEAVY) == set(FLOORS)
    assert len(rooms) <= MOST_ROOMS


def test_the_readme_has_the_map():
    text = (ROOT / "README.md").read_text()
    rooms = set(FLOORS) - {"config", "origins", "plugins", "config_hints", "inputs", "errors"}
    assert {
        room for room in rooms if not re.search(rf"^    (mpitrain/)?{room}(/|\.py) ", text, re.M)
    } == set()


def test_a_run_is_opened_without_torch():
    """A wrong configuration is refused before all ranks load it."""
    code = "import sys, mpitrain.training.prepare; sys.exit('torch' in sys.modules)"
    assert finished([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_nobody_imports_the_bare_packages():
    """`import comm` works from the repository root, gives a second copy of the module, and hides
    Jupyter's comm.
    """
    for folder in ("schedules", "comm", "mpitrain", "tests"):
        for path in files(folder):
            wrong = [name for name in imported_names(path) if name.split(".")[0] in HEAVY]
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def defined_twice(source: str) -> list[str]:
    """Return the functions of a file that a later one of the same name in the same place replaces."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.Module):
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            names = [each.name for each in functions if not each.decorator_list]  # setters, overloads
            found += sorted({name for name in names if names.count(name) > 1})
    return found


def test_no_function_replaces_another_of_its_name():
    """ruff says nothing of a method that is used in between."""
    assert defined_twice("class A:\n    def take(self): ...\n    def take(self): ...") == ["take"]
    every = [path for top in ("mpitrain", *HEAVY, "tests", "benchmarks") for path in files(top)]
    assert {str(path): found for path in every if (found := defined_twice(path.read_text()))} == {}


def test_package_init_holds_only_the_version():
    """It runs before every submodule, on every rank."""
    (assignment,) = ast.parse(Path(mpitrain.__file__).read_text()).body
    assert [target.id for target in assignment.targets] == ["__version__"]


def test_every_package_is_installed():
    """An editable install finds a folder that setup.cfg forgets; a normal one doesn't."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    tops = [ROOT / "mpitrain", *(ROOT / "mpitrain" / top for top in HEAVY)]  # a link isn't followed
    folders = {
        ".".join(path.parent.relative_to(ROOT).parts) for top in tops for path in top.rglob("__init__.py")
    }
    assert folders | {"mpitrain.jobs"} == set(setup["options"]["packages"].split())


def test_a_clone_is_one_tree(tmp_path):
    """On PYTHONPATH its own packages are found, not those that are installed; and never a bare `comm`."""
    for top in ("mpitrain", *HEAVY, "jobs"):
        copied(top, tmp_path)
    names = [f"mpitrain.{name}" for name in ("comm", "schedules", "jobs", "errors")]
    code = f"import sys, importlib\nfor name in {names}: print(importlib.import_module(name).__file__)\n"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = finished([sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True)
    assert len(done.stdout.split()) == len(names), done.stderr
    assert all(path.startswith(f"{tmp_path}/mpitrain/") for path in done.stdout.split()), done.stdout
    alone = "import importlib.util, sys; sys.exit(importlib.util.find_spec('schedules') is not None)"
    assert finished([sys.executable, "-c", alone], cwd="/").returncode == 0


OPENS = {
    "open",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "touch",
    "load",
    "memmap",
    "fromfile",
    "File",
    "ZipFile",
}
# of mpitrain/inputs.py: a regular file, no FIFO is waited for, the former through no link
WITH_LIMITS = {"open_regular", "open_file", "new_file"}
# by room or file, what else is opened there, and why that is no file of a run directory or of a
# stranger's
MADE_HERE = "a temporary folder that this process has made"
ELSEWHERE = {
    "mpitrain/inputs.py": {"open": "it is the door itself", "os.open": "it is the door itself"},
    "mpitrain/cluster/allocation.py": {"read_text": "/proc"},
    "mpitrain/cluster/console.py": {"os.open": "/dev/null"},
    "mpitrain/cluster/launch.py": {"read_bytes": "/proc", "read_text": "/proc"},
    "mpitrain/cluster/watchdog_rendezvous.py": {"os.open": "the launcher's own stderr", "open": "/proc"},
    "mpitrain/cluster/lock.py": {"read_text": "/proc"},
    "mpitrain/cluster/nodes.py": {"read_text": "/proc"},
    "mpitrain/cluster/code_identity.py": {"read_bytes": "the code of mpitrain itself"},
    "mpitrain/cluster/processes.py": {"open": "/proc", "read_text": "/proc"},
    "mpitrain/cluster/resident.py": {"read_text": "/proc"},
    "mpitrain/cluster/shared_memory.py": {"read_bytes": "/proc"},
    "mpitrain/cluster/std_streams.py": {"os.open": "/dev", "read_bytes": "/proc"},
    "mpitrain/weights/logits.py": {"write_text": MADE_HERE, "np.load": MADE_HERE},
    "mpitrain/measuring/measured_rounds.py": {"read_text": "/proc"},
    "mpitrain/dryrun/dry_run.py": {"read_text": "/proc"},
    "mpitrain/training/machine/gpus.py": {"read_text": "/sys"},
    "comm/base/launchers.py": {"read_bytes": "/proc", "read_text": "/proc"},
    "comm/transports/window.py": {"open": "/dev/zero"},
    "comm/base/world.py": {"read_text": "/proc", "write_text": "/proc"},
    "mpitrain/checkpoint/files.py": {"h5py.File": "writes to memory, or to an open file"},
    "mpitrain/commands/job/render.py": {
        "read_text": "a template beside the code",
        "open": "a new script, and later the same",
    },
    "mpitrain/data/read_tokens.py": {"np.memmap": "an open file"},
    "mpitrain/plan/routing_file.py": {
        "np.load": "bytes that are read",
        "zipfile.ZipFile": "bytes that are read",
    },
    "mpitrain/training/replay/recording.py": {
        "zipfile.ZipFile": "the draft of replacing()",
        "self._file.open": "a member of an archive",
    },
    "mpitrain/training/replay/replay.py": {"self._file.open": "a member of an archive"},
}  # fmt: skip
# methods of ours that have such a name
NO_FILES = {"settings.load", "steps.open", "kept.open", "self.parcel.open"}


def opened_elsewhere(root: Path) -> Iterator[tuple[str, str, int]]:
    """Yield file, call and line of whatever opens a file by a path, and not by a descriptor of
    mpitrain/inputs.py.
    """
    for path in sorted(file for top in ("mpitrain", *HEAVY) for file in (root / top).rglob("*.py")):
        for called, line in opened_in(path.read_text()):
            yield str(path.relative_to(root)), called, line


@cache
def opened_in(source: str) -> list[tuple[str, int]]:
    """Return call and line of whatever opens a file by a path."""
    tree = ast.parse(source)
    found = []
    by_name = {
        ast.unparse(node.targets[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _is_door(node.value)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in OPENS:
            continue
        if isinstance(node.func, ast.Name) and node.func.id != "open":  # a function of ours
            continue
        called = ast.unparse(node.func)
        given = node.args[0] if node.args else None
        if called in NO_FILES or called.endswith(").open") or (given is not None and _is_door(given)):
            continue
        if given is None or ast.unparse(given) not in by_name:
            found.append((called, node.lineno))
    return found


def _is_door(node: ast.expr) -> bool:
    """Return whether an expression gives a descriptor of mpitrain/inputs.py, perhaps by another
    function, or one of two.
    """
    if isinstance(node, ast.IfExp):
        return _is_door(node.body) and _is_door(node.orelse)
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    return name in WITH_LIMITS or (
        name in ("os.fdopen", "zipfile.ZipFile") and bool(node.args) and _is_door(node.args[0])
    )


def _is_known(file: str, called: str) -> bool:
    known = ELSEWHERE.get(file, {})
    return called in known or (called.rpartition(".")[2] in known and called not in ("os.open", "np.load"))


def test_files_of_a_run_directory_are_opened_by_one_door():
    """Which reads what is regular and no larger than it may be, waits for no FIFO, and goes through
    no link.
    """
    unknown = [
        f"{file}:{line} calls {called}()"
        for file, called, line in opened_elsewhere(ROOT)
        if not _is_known(file, called)
    ]
    assert not unknown, "open it by mpitrain/inputs.py, or say in ELSEWHERE why not: " + ", ".join(unknown)


def test_what_is_said_to_be_opened_elsewhere_is():
    found = {(file, called) for file, called, _ in opened_elsewhere(ROOT)}
    for file, known in ELSEWHERE.items():
        for name in known:
            assert any(
                file == where and (called == name or called.endswith(f".{name}")) for where, called in found
            ), (file, name)


@pytest.mark.parametrize(
    "planted",
    ["open(path)", "path.read_text()", "np.load(path)", "os.open(path, 0)", "with path.open() as x: pass"],
)
def test_a_file_that_is_opened_by_its_path_is_found(tmp_path, planted):
    for top in ("mpitrain", *HEAVY):
        copied(top, tmp_path)
    path = tmp_path / "mpitrain/cluster/rundir.py"
    path.write_text(f"{path.read_text()}\n\ndef late(path):\n    {planted}\n")
    unknown = [
        (file, called) for file, called, _ in opened_elsewhere(tmp_path) if not _is_known(file, called)
    ]
    assert [file for file, _ in unknown] == ["mpitrain/cluster/rundir.py"], unknown

"""Who may import what: schedules and comm stand below everything else and don't know each other."""

import ast
import configparser
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import mpitrain

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"schedules": {"torch", "numpy", "mpi4py"}, "comm": {"torch"}}


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


@pytest.mark.parametrize("package", HEAVY)
def test_imports_nothing_of_ours_but_errors(package):
    allowed = ("mpitrain.errors", f"mpitrain.{package}")
    for path in files(package):
        ours = [name for name in imported_names(path) if name.split(".")[0] == "mpitrain"]
        wrong = [name for name in ours if not any(name == own or name.startswith(own + ".") for own in allowed)]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_a_run_is_opened_without_torch():
    """A wrong configuration is refused before all ranks load it."""
    code = "import sys, mpitrain.opening; sys.exit('torch' in sys.modules)"
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
    folders = {f"mpitrain.{path.parent.name}" for path in ROOT.glob("*/*/__init__.py") if path.parent.parent.name == "mpitrain"}
    assert folders | {"mpitrain", "mpitrain.comm", "mpitrain.schedules"} == set(setup["options"]["packages"].split())

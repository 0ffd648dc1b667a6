"""Without an MPI library, or with one that doesn't fit.

One message that says what to load, and all that needs none works.

The environment is a real one: a virtual environment that sees the packages of this one, but not the
MPI library beside them.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import LONG
from launch import environment, finished, mpirun, tiny, write_text

PACKAGES = Path(sysconfig.get_path("purelib"))
# what a module of a cluster sets
LIBRARY = ("LD_LIBRARY_PATH", "LD_PRELOAD", "MPI4PY_LIBMPI", "MPI4PY_MPIABI", "PYTHONPATH")
MPITRAIN = ("-m", "mpitrain")


def make_environment(folder: Path, packages: Path) -> str:
    """Make a virtual environment that has the packages of a folder; return its Python."""
    finished([sys.executable, "-m", "venv", "--without-pip", "--symlinks", folder], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "packages.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    found = make_environment(tmp_path_factory.mktemp("without") / "mpi", PACKAGES)
    if call(found, "-c", "from mpi4py import MPI").returncode == 0:
        pytest.skip("this system has an MPI library where every program finds it")
    return found


def call(python: str, *words: object, **env: str | None) -> subprocess.CompletedProcess:
    """Run a program that no launcher has started and no module has set up."""
    given = {**environment(**dict.fromkeys(LIBRARY)), **env}
    return finished(
        [python, *map(str, words)],
        capture_output=True,
        text=True,
        env={k: v for k, v in given.items() if v is not None},
    )


def fault(done: subprocess.CompletedProcess, kind: str = "MeshError") -> str:
    """Return the one message of a command that was refused."""
    text = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in text and text.count(f"{kind}: ") == 1, text
    return text.partition(f"{kind}: ")[2]


SMALL = ("--ranks", "2", "--set", "model.layers=2", "--set", "batch.global=4")


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(
    "words",
    [
        "--help",
        pytest.param("--version", marks=LONG),
        "schedule zbv --stages 2 --microbatches 4",
        f"check {' '.join(SMALL)}",
        pytest.param(f"program --rank 1 {' '.join(SMALL)}", marks=LONG),
        pytest.param(f"memory {' '.join(SMALL)}", marks=LONG),
        "job slurm --nodes 2 --time 1:00:00 --out {}/job.sh",
        "job again 0",
        pytest.param("run --help", marks=LONG),
        pytest.param("ckpt --help", marks=LONG),
    ],
)
def test_what_sends_no_message_works(python, tmp_path, words):
    done = (
        call(python, *MPITRAIN, *words.format(tmp_path).split(), "--set", f"run.dir={tmp_path}")
        if "job" in words
        else None
    )
    done = done or call(python, *MPITRAIN, *words.split())
    assert done.returncode in (0, 1 if "again" in words else 0), done
    assert done.stdout, done
    assert not done.stderr, done


@LONG
def test_checkpoints_are_looked_at(python, tmp_path):
    done = mpirun(
        1,
        sys.executable,
        *MPITRAIN,
        "run",
        *tiny(tmp_path / "run", write_text(tmp_path / "text.txt"), run_steps=1),
    )
    assert done.returncode == 0, done.output
    for words in (("inspect",), ("verify",), ("diff", tmp_path / "run")):
        done = call(python, *MPITRAIN, "ckpt", words[0], tmp_path / "run", *words[1:])
        assert done.returncode == 0 and done.stdout, done


@pytest.mark.parametrize(
    "words",
    [
        "run",
        "verify --layout tp=1",
        *(
            pytest.param(words, marks=LONG)
            for words in ("run --dry-run", "replay {}/none.npz", "generate {} --prompt a")
        ),
    ],
)
def test_what_needs_one_says_so_once(python, tmp_path, words):
    text = fault(call(python, *MPITRAIN, *words.format(tmp_path).split()))
    assert all(
        part in text
        for part in (
            os.uname().nodename,
            "no MPI library",
            "libmpi.so.12",
            "module load",
            "pip install mpich",
        )
    ), text


def test_doctor_reports_all_else_first(python):
    done = call(python, *MPITRAIN, "doctor")
    assert "no MPI library" in fault(done)
    for name in ("launcher", "cores", "shared memory", "torch", "CPU products", "GPU driver"):
        assert re.search(rf"^{name} +\S", done.stdout, re.MULTILINE), done.stdout


def test_a_library_that_is_no_library(python, tmp_path):
    (tmp_path / "libmpi.so").write_text("nonsense")
    text = fault(call(python, *MPITRAIN, "run", MPI4PY_LIBMPI=str(tmp_path / "libmpi.so")))
    assert "can't be loaded: " in text, text
    assert "libmpi.so: file too short" in text, text
    assert "unset MPI4PY_LIBMPI" in text, text


def test_a_library_that_needs_another_one(python, tmp_path):
    """As where a module was loaded, but not those that it needs."""
    if not shutil.which("gcc"):
        pytest.skip("no C compiler")
    for name, more in (("needed", ()), ("mpi", ("-Wl,--no-as-needed", "-L.", "-lneeded"))):
        finished(
            ["gcc", "-shared", "-o", f"lib{name}.so", "-x", "c", "/dev/null", *more], cwd=tmp_path, check=True
        )
    (tmp_path / "libneeded.so").unlink()
    text = fault(call(python, *MPITRAIN, "run", MPI4PY_LIBMPI=str(tmp_path / "libmpi.so")))
    assert "an MPI library is there but can't be loaded: libneeded.so: cannot open" in text, text


@pytest.mark.parametrize("path", ["/nowhere", pytest.param("/nowhere/libmpi.so", marks=LONG)])
def test_a_variable_that_points_nowhere_is_named(python, path):
    text = fault(call(python, *MPITRAIN, "run", MPI4PY_LIBMPI=path))
    assert "no MPI library is found" in text, text
    assert f"MPI4PY_LIBMPI is set to {path}; unset MPI4PY_LIBMPI" in text, text


def test_an_interface_that_mpi4py_does_not_know(python):
    assert "mpi4py knows no MPI4PY_MPIABI=lam; unset it, or set it to mpich or openmpi" in fault(
        call(python, *MPITRAIN, "run", MPI4PY_MPIABI="lam")
    )


def test_the_library_of_another_mpi():
    """mpi4py is made for one MPI, as where it was built, and finds the other one's library.

    here, where there is none of its own.
    """
    other = "openmpi" if list(Path(sys.prefix, "lib").glob("libmpi.so.12")) else "mpich"
    text = fault(call(sys.executable, *MPITRAIN, "run", MPI4PY_MPIABI=other))
    assert (
        "the MPI library that mpi4py needs is not found: libmpi.so." in text
        and f"MPI4PY_MPIABI is set to {other}" in text
    ), text


def test_a_library_under_the_name_of_another_mpis(tmp_path):
    """Symbols are missing then."""
    lib = Path(sys.prefix, "lib")
    known = {"libmpi.so.12": ("openmpi", "libmpi.so.40"), "libmpi.so.40": ("mpich", "libmpi.so.12")}
    mine = next((name for name in known if (lib / name).exists()), None)
    if mine is None:
        pytest.skip("the MPI library isn't a wheel's")
    other, name = known[mine]
    (tmp_path / name).symlink_to(lib / mine)
    env = {"MPI4PY_MPIABI": other, "LD_LIBRARY_PATH": f"{tmp_path}:{lib}", "LD_PRELOAD": str(lib / mine)}
    text = fault(call(sys.executable, *MPITRAIN, "run", **env))
    assert "mpi4py and the MPI library don't match: " in text, text
    assert "undefined symbol" in text, text


@LONG
def test_one_rank_that_lacks_it_ends_the_job_with_one_report(tmp_path):
    lacks = (
        'if test "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 1; then export MPI4PY_LIBMPI=/nowhere; fi; exec "$0" '
        '"$@"'
    )
    given = tiny(tmp_path / "run", write_text(tmp_path / "text.txt"), run_steps=1)
    done = mpirun(2, "sh", "-c", lacks, sys.executable, *MPITRAIN, "run", *given)
    assert done.returncode == 2 and done.output.count("no MPI library is found") == 1, done.output
    assert "rank 1 of 2 failed in phase start" in done.output, done.output
    assert "Traceback" not in done.output, done.output


# ---------------------------------------------------------------- other libraries that are missing


MISSING = [
    ("torch", "run"),
    pytest.param("h5py", "run", marks=LONG),
    ("h5py", "ckpt inspect ."),
    ("msgspec", "check"),
    pytest.param("numpy", "run", marks=LONG),
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("package", "words"), MISSING)
def test_a_package_that_is_missing_is_named(tmp_path, package, words):
    """All others are there."""
    (tmp_path / "packages").mkdir()
    for path in PACKAGES.iterdir():
        if not re.match(rf"{package}([.-]|$)", path.name):
            (tmp_path / "packages" / path.name).symlink_to(path)
    python = make_environment(tmp_path / "lacks", tmp_path / "packages")
    library = next(Path(sys.prefix, "lib").glob("libmpi.so.*"), None)  # a wheel's
    env = {} if library is None else {"MPI4PY_LIBMPI": str(library)}
    text = fault(call(python, *MPITRAIN, *words.split(), **env), "LibraryError")
    assert text.startswith(f"{package} is not installed for {python}; pip install {package}"), text
    if package == "torch":
        done = call(python, *MPITRAIN, "doctor", **env)
        assert fault(done, "LibraryError").startswith("torch is not installed") and re.search(
            "^MPI +[MO]", done.stdout
        ), done

"""Run tests with the oldest version of each library that setup.cfg declares and this Python has a wheel for.

    python tests/oldest_versions.py                        a new environment in a temporary folder,
                                                           the tests of TESTS
    python tests/oldest_versions.py --mpi openmpi tests/unit/plan/test_config.py ...
    python tests/oldest_versions.py --folder DIR           keeps the environment, and uses it again

torch is the newest that setup.cfg allows: older wheels of it for x86 bring gigabytes of CUDA along;
`--torch 2.11.0` tries another.
"""

import argparse
import configparser
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
NO_VERSION = "0.dev0"
EXTRAS = ("hf", "plot", "test")
# What each library is used for: refused values and typed files (msgspec), command lines (click,
# rich), checkpoints (h5py, numpy, xxhash), tokens and tokenizers, pictures (matplotlib), the
# written configuration (tomli-w), and runs under mpirun, which use all of them.
TESTS = [
    "test_config", "test_odd_input", "test_run_commands", "test_run_bad_input", "test_cluster_console",
    "test_schedule_command", "test_schedules_draw", "test_job_command", "test_ckpt_commands",
    "test_checkpoint_roundtrip", "test_checkpoint_save", "test_checkpoint_versions",
    "test_data_tokenizer", "test_data_tokens", "test_data_corpus", "test_run_lock", "test_layering",
    "test_run_resume", "test_optim_steps",
]  # fmt: skip


def declared(mpi: str) -> Iterator[Requirement]:
    """Yield what setup.cfg declares, without what an environment gets otherwise.

    torch, another MPI, transformers.
    """
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    texts = [
        config["options"]["install_requires"],
        *(config["options.extras_require"][extra] for extra in (mpi, *EXTRAS)),
    ]
    lines = (line.strip() for text in texts for line in text.splitlines())
    found = {line: Requirement(line) for line in lines if line and not line.startswith("#")}
    yield from (each for each in found.values() if each.name != "torch")


def oldest(requirement: Requirement) -> Version:
    """Return the oldest version of a library that is declared and has a wheel for this Python."""
    # pip answers with those that there are wheels of; `pip index` lists others, too
    asked = f"{requirement.name}=={NO_VERSION}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
        "--only-binary=:all:",
        asked,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r"from versions: ([^)]*)\)", done.stderr)
    versions = [Version(text) for text in found[1].split(", ") if text != "none"] if found else []
    usable = [version for version in versions if version in requirement.specifier]
    if not usable:
        sys.exit(
            f"{requirement}: no wheel for Python {sys.version_info.major}.{sys.version_info.minor} "
            f"{done.stderr[-500:]}"
        )
    return min(usable)


def environment(folder: Path, mpi: str, torch: str) -> Path:
    """Make an environment with the oldest versions, unless there is one, and return its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pins = sorted({f"{each.name}=={oldest(each)}" for each in declared(mpi)})
    sys.stdout.write(f"Python {sys.version.split()[0]}, torch {torch}, {' '.join(pins)}\n")
    sys.stdout.flush()
    install = [python, "-m", "pip", "install", "--quiet", "--only-binary=:all:", f"torch=={torch}", *pins]
    subprocess.run(install, check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "-e", ROOT], check=True)
    return python


def files() -> list[str]:
    """Return the files of TESTS, in whatever room they are."""
    return [str(path) for name in TESTS for path in (ROOT / "tests").rglob(f"{name}.py")]


def newest_torch() -> str:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return re.search(r"torch.*<=([0-9.]+)", config["options"]["install_requires"])[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mpi", choices=("mpich", "openmpi"), default="mpich")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--torch", default=newest_torch())
    parser.add_argument("tests", nargs="*", default=files())
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mpitrain-oldest-") as temporary:
        folder = (given.folder or Path(temporary)).absolute()
        python = environment(folder, given.mpi, given.torch)
        env = os.environ | {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(folder),
        }
        return subprocess.run([python, "-m", "pytest", "-q", *given.tests], cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())

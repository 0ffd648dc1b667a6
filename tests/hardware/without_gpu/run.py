"""Run a command with a GPU that isn't there.

Every line of the CUDA path, by torch's CUDA build, on a machine without one.

    python3.11 -m venv cuda && . cuda/bin/activate && pip install torch==2.11.0 -e '.[mpich,test]'
        5 GB: torch's CUDA build
    python tests/hardware/without_gpu/run.py mpirun -n 2 mpitrain run --set run.device=cuda --set run.steps=5
    python tests/hardware/without_gpu/run.py --late 3 mpirun -n 2 python -m pytest --only-mpi -m gpu -p
        no:cacheprovider tests
    python tests/hardware/without_gpu/run.py --empty --gigabytes 150 mpirun -n 1 mpitrain run --set
        run.device=cuda --set model.preset=llama3.2-1b

    as it is  numbers are those of a GPU, but for the rounding of its kernels, and all that is
              queued happens at once
    --late N  what is queued happens when somebody waits for it; events come at other moments for
              each N and rank
    --empty   no numbers: what torch allocates, and how long the host takes, for models that this
              machine can't hold

torch's checks, allocators, streams, events and autograd's thread are its own; it knows no kernel's
mistakes, and no speed. Triton's kernels (run.compile) are compiled, but do nothing: with it use
--empty; else run.compile = "auto" finds no compiler.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


def built(folder: Path) -> Path:
    """Return the library of the device, made in `folder` by the headers that torch's CUDA build
    brought along.
    """
    site = Path(sysconfig.get_path("purelib"))
    headers = [
        *site.glob("nvidia/cu*/include"),
        *site.glob("nvidia/cuda_runtime/include"),
        site / "triton/backends/nvidia/include",
    ]
    if importlib.util.find_spec("triton") is None or len(headers) < 2:
        raise FileNotFoundError(
            f"found no headers of CUDA in {site}; needed torch's CUDA build; pip install torch==2.11.0 in an "
            "environment of its own"
        )
    library = folder / "libcuda.so.1"  # Triton looks for the driver by this name
    options = [
        "-std=c++17",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        *(f"-I{header}" for header in headers),
    ]
    subprocess.run(["g++", *options, HERE / "device.cpp", "-o", library, "-ldl"], check=True)
    (folder / "libcuda.so").symlink_to(library.name)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--late", type=int, metavar="SEED")
    parser.add_argument("--empty", action="store_true")
    parser.add_argument("--gigabytes", type=float, default=80)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if not given.command:
        parser.error(
            "found no command; needed one to run, such as mpirun -n 2 mpitrain run --set run.device=cuda"
        )
    with tempfile.TemporaryDirectory(prefix="without-gpu-") as folder:
        try:
            library = built(Path(folder))
        except FileNotFoundError as error:  # of headers, or of g++
            parser.error(str(error))
        before = {
            name: os.environ.get(name, "").split(":")
            for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "LD_PRELOAD")
        }
        first = {"LD_LIBRARY_PATH": folder, "PYTHONPATH": str(HERE / "site"), "LD_PRELOAD": str(library)}
        env = os.environ | {
            name: ":".join(filter(None, [first[name], *others])) for name, others in before.items()
        }
        env |= {"UNREAL_GPU_GB": str(given.gigabytes)}
        env |= {"UNREAL_GPU_LATE": str(given.late)} if given.late is not None else {}
        # without a C compiler run.compile = "auto" leaves numbers to the kernels that this GPU has
        env |= {"UNREAL_GPU_EMPTY": "1"} if given.empty else {"CC": os.environ.get("CC", "/nonexistent")}
        return subprocess.run(given.command, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

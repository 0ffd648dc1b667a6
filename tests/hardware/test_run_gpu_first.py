"""benchmarks/gpu_first.py walks through all of it without a GPU.

Nothing fails but what only a GPU can do.

By default those parts that tell of bits; with MPITRAIN_EFFORT=all those of speed, too, and the
tests, which run anyway.
"""

import json
import sys

from conftest import EVERY, LONG
from folders import ROOT
from launch import mpirun, tail

FEW = ("facts", "kernels", "parity")
ONLY_A_GPU = {"product into fp32", "fp8 product"}
PARTS = {
    "facts": {"cores", "python", "torch", "doctor"},
    "kernels": {
        "sum of 2",
        "sum of 3",
        "sum of 8",
        "attention, deterministic=True",
        "attention, deterministic=False",
    },
    "tests": {"2 ranks"},
    "parity": {"one rank", "one rank again", "tp", "the same bits twice"},
    "steps": {"as they are", "compiled", "compiled, not deterministic", "plain torch"},
    "staging": {"1 rank", "2 ranks", "2 ranks, messages"},
}


def flaws(found, path=()):
    """Yield where something failed or was stopped."""
    for key, value in (
        found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    ):
        if key in ("failed", "stopped") or (key == "code" and value != 0):
            yield (*path, key, value)
        yield from flaws(value, (*path, key))


@LONG
def test_the_script_for_a_first_gpu_walks_through(tmp_path):
    out = tmp_path / "found.json"
    words = (str(ROOT / "benchmarks/gpu_first.py"), "--device", "cpu", "--small", "--out", str(out))
    chosen = [part for part in PARTS if EVERY or part in FEW]
    done = mpirun(0, sys.executable, *words, "--only", *chosen, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, tail(done.output)
    found = json.loads(out.read_text())
    for part in chosen:
        assert PARTS[part] <= {*found[part]}, f"{part}: {found[part]}"
    assert not list(flaws(found)), list(flaws(found))
    assert (
        found["parity"]["the same bits twice"]
        and found["parity"]["tp"]["largest difference of a loss"] < 0.01
    )
    assert (
        found["kernels"]["sum of 3"]["equal"]
        and found["kernels"]["attention, deterministic=True"]["same bits"]
    )
    assert "tests" not in chosen or "passed" in found["tests"]["2 ranks"]["said"][-1]
    errors = {key for key, value in found["kernels"].items() if isinstance(value, str) and "Error" in value}
    assert errors <= ONLY_A_GPU, found["kernels"]

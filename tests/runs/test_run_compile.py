"""`mpitrain run` with run.compile.

What it says, that nobody's limit is too short for it, and what it refuses.
"""

import json

from conftest import LONG
from launch import MPITRAIN, mpirun, options, slowness

SMALL = {
    "model.layers": 2, "model.width": 32, "model.heads": 2, "model.kv_heads": 1, "model.ffn": 96,
    "data.sequence": 16, "batch.global": 8,
    "run.steps": 3, "run.save_every": 0, "parallel.pp": 2,
}  # fmt: skip


@LONG
def test_it_says_so_and_no_step_has_to_wait_for_a_compiler(tmp_path):
    """A limit of a second of an idle machine is less than compiling takes.

    The first stage waits for the last one.
    """
    limit_s = slowness()
    runs = {}
    for compile_ in ("true", "false"):
        given = {
            **SMALL,
            "run.compile": compile_,
            "comm.timeout_s": limit_s if compile_ == "true" else 200,
            "run.dir": tmp_path / compile_,
        }
        done = mpirun(2, MPITRAIN, "run", *options(given), timeout=110)
        assert done.returncode == 0, done.output
        assert ("is compiled (run.compile), in C++" in done.output) == (compile_ == "true")
        runs[compile_] = [
            json.loads(line) for line in (tmp_path / compile_ / "metrics.jsonl").read_text().splitlines()
        ]
    for step, (found, expected) in enumerate(zip(runs["true"], runs["false"], strict=True)):
        assert all(
            abs(found[key] / expected[key] - 1) < 1e-5
            for key in ("loss", "grad_norm", "val_loss")
            if key in expected
        ), step
        assert found.get("step_s", 0) < limit_s


def test_without_a_compiler_it_is_refused_before_anything_is_written(tmp_path):
    given = {**SMALL, "run.compile": "true", "run.dir": tmp_path / "run"}
    done = mpirun(2, MPITRAIN, "run", *options(given), env={"CXX": "/nonexistent"}, timeout=60)
    assert done.returncode == 2, done.output
    assert "found no C++ compiler (/nonexistent)" in done.output and "set run.compile=false" in done.output
    assert done.output.count("ConfigError") == 1 and "Traceback" not in done.output
    assert not list(tmp_path.iterdir())

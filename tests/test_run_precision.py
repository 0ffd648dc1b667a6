"""Runs in 16 bits and in fp8 follow the run in fp32. MPITRAIN_LAYOUTS=all: 300 steps of the quickstart, not 60 of a tiny model.

The band: the mean loss of any 20 steps within 4 % of fp32's, and the last validation loss within 2 %. (Seen over 300 steps of the
quickstart: at most 1.9 %, and 0.5 %.)
"""

import json

import pytest
from conftest import EVERY
from launch import MPITRAIN, mpirun, options, run_tiny, tail, write_text

AT_ONCE = 20  # steps whose mean is compared


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("precision")
    text = write_text(folder / "text.txt")

    def run(compute):
        """Return the losses of the steps and the last validation loss."""
        run_dir = folder / compute
        if not run_dir.exists():
            if EVERY:
                settings = {"run.dir": run_dir, "run.steps": 300, "run.save_every": 0, "precision.compute": compute}
                done = mpirun(2, MPITRAIN, "run", *options(settings), timeout=1200)
            else:
                done = run_tiny(2, run_dir, text, run_steps=60, model_width=64, precision_compute=compute)
            assert done.returncode == 0, tail(done.output)
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines[1:]], lines[-1]["val_loss"]

    return run


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp8"])
def test_narrow_numbers_follow_fp32(run, compute):
    (expected, last), (found, last_found) = run("fp32"), run(compute)
    assert found != expected
    means = [[sum(losses[i : i + AT_ONCE]) for i in range(0, len(losses), AT_ONCE)] for losses in (expected, found)]
    errors = [abs(b - a) / a for a, b in zip(*means, strict=True)]
    assert max(errors) < 0.04, errors
    assert abs(last_found - last) < 0.02 * last, (last_found, last)

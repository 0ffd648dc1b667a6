"""Runs in 16 bits and in fp8 follow the run in fp32.

MPITRAIN_EFFORT=all: 300 steps of the quickstart, not 40 of a tiny model.

The band: the mean loss of any 20 steps within 4 % of fp32's, and the last validation loss within
2 %. (Seen over 300 steps of the quickstart: at most 1.9 %, and 0.5 %.)
"""

import json

import pytest
from conftest import EVERY, LONG
from launch import MPITRAIN, mpirun, options, run_several, tail, write_text

NARROW = ("bf16", "fp16", "fp8")
AT_ONCE = 20  # steps whose mean is compared


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{type: the losses of the steps, the last validation loss}."""
    folder = tmp_path_factory.mktemp("precision")
    text = write_text(folder / "text.txt")
    if EVERY:
        for compute in ("fp32", *NARROW):
            settings = {
                "run.dir": folder / compute,
                "run.steps": 300,
                "run.save_every": 0,
                "precision.compute": compute,
            }
            done = mpirun(2, MPITRAIN, "run", *options(settings), timeout=1200)
            assert done.returncode == 0, tail(done.output)
    else:
        tiny = {"run_steps": 40, "model_width": 64, "batch_micro": 4, "run_save_every": 0}
        run_several(
            2,
            text,
            {folder / compute: {**tiny, "precision_compute": compute} for compute in ("fp32", *NARROW)},
        )
    found = {}
    for compute in ("fp32", *NARROW):
        lines = [json.loads(line) for line in (folder / compute / "metrics.jsonl").read_text().splitlines()]
        found[compute] = [line["loss"] for line in lines[1:]], lines[-1]["val_loss"]
    return found


@LONG
@pytest.mark.parametrize("compute", NARROW)
def test_narrow_numbers_follow_fp32(runs, compute):
    (expected, last), (found, last_found) = runs["fp32"], runs[compute]
    assert found != expected
    means = [
        [sum(losses[i : i + AT_ONCE]) for i in range(0, len(losses), AT_ONCE)] for losses in (expected, found)
    ]
    errors = [abs(b - a) / a for a, b in zip(*means, strict=True)]
    assert max(errors) < 0.04, errors
    assert abs(last_found - last) < 0.02 * last, (last_found, last)

"""GPT-2 with dropout has the same bits whatever the pipeline ranks, the schedule, ZeRO and
recomputation, and after a restart. Validation drops nothing.
"""

import json

import pytest
from conftest import LONG
from launch import loss_lines, run_several, write_text

pytestmark = LONG  # tests/ranks/test_train_dropout.py has the same of steps

GPT2 = {
    "model_family": "gpt2", "model_layers": 4, "model_kv_heads": 2, "schedule_name": "constant",
    "run_steps": 4, "run_eval_every": 2, "run_save_every": 2,
}  # fmt: skip
DROPOUT = {f"model_{name}_dropout": 0.2 for name in ("embedding", "attention", "residual")}
ONE_RANK = {
    "whole": {},
    "first half": {"run_steps": 2},  # then as long as the whole
    "every": {"memory_recompute": "every-k", "memory_every": 2},
    "without": dict.fromkeys(DROPOUT, 0.0),
}
PIPELINES = {"zbv": {"parallel_pp": 2, "pipeline_schedule": "zbv", "memory_recompute": "full"}}
STEP = {"parallel_dp": 2, "parallel_reduce": "step"}
DATA_PARALLEL = {  # whose first is what the others are held against
    "zero 0": {**STEP, "parallel_zero": 0},
    "zero 1": {**STEP, "parallel_zero": 1, "memory_recompute": "selective"},
    "zero 3": {**STEP, "parallel_zero": 3},
}
BOTH = {"dp pp": {**STEP, "parallel_pp": 2, "parallel_zero": 2}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the loss lines of each run by its name."""
    folder = tmp_path_factory.mktemp("dropout")
    text = write_text(folder / "text.txt")
    every = {1: ONE_RANK, 2: PIPELINES | DATA_PARALLEL, 4: BOTH}
    for size, named in every.items():
        changed = {folder / name: GPT2 | DROPOUT | changes for name, changes in named.items()}
        run_several(size, text, changed)
    # on other ranks than it began on
    run_several(2, text, {folder / "first half": GPT2 | DROPOUT | PIPELINES["zbv"]})
    return {name: loss_lines(folder / name) for named in every.values() for name in named}


@pytest.mark.parametrize("name", ["first half", "every", *PIPELINES])
def test_a_run_with_dropout_has_the_bits_of_one_rank(runs, name):
    assert len(runs["whole"]) == 5
    assert runs[name] == runs["whole"]


@pytest.mark.parametrize("name", ["zero 1", "zero 3", *BOTH])
def test_a_run_with_dropout_has_the_bits_of_its_data_ranks(runs, name):
    assert runs[name] == runs["zero 0"]


def test_data_ranks_drop_what_one_rank_drops(runs):
    """Sums in another order, and no other masks."""
    one, two = ([json.loads(line)["loss"] for line in runs[name][1:]] for name in ("whole", "zero 0"))
    assert one == pytest.approx(two, rel=1e-5)


def test_training_drops_and_validation_does_not(runs):
    whole, without = ([json.loads(line) for line in runs[name]] for name in ("whole", "without"))
    assert whole[0]["val_loss"] == without[0]["val_loss"]  # of the same first weights
    assert whole[1]["loss"] != without[1]["loss"]

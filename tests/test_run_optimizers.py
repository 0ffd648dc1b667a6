"""With every optimiser, a run goes on from its checkpoint in another division of the state, with the bits of the run without a stop."""

import json

import pytest
from launch import loss_lines, run_tiny, tail, write_text

KEYS = dict(run_save_every=4, run_eval_every=4, schedule_name="constant", parallel_dp=2)
STEPS = 10


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("optimizers") / "text.txt")


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_a_run_goes_on_in_another_division_with_the_same_bits(tmp_path, text, name):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    lines = {}
    for run_dir, steps, zero in ((whole, STEPS, 1), (stopped, 4, 3), (stopped, 8, 0), (stopped, STEPS, 2)):
        done = run_tiny(2, run_dir, text, **KEYS, optimizer_name=name, run_steps=steps, parallel_zero=zero)
        assert done.returncode == 0, tail(done.output)
        lines[run_dir] = loss_lines(run_dir)
    assert "going on after step 8" in done.output
    assert lines[stopped] == lines[whole]
    losses = [json.loads(line)["val_loss"] for line in (lines[whole][0], lines[whole][-1])]
    assert losses[1] < losses[0]

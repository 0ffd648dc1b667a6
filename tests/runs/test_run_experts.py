"""Runs with experts: the same bits over pipelines, ZeRO, transports and restarts.

Checkpoints that resume with other experts' ranks.
"""

import json
import shutil

import numpy as np
import pytest
from conftest import LONG
from launch import loss_lines, run_tiny, tail, write_text

STEPS = 8
SETTINGS = dict(
    model_family="mixtral", experts_count=4, run_steps=STEPS, run_save_every=4, run_eval_every=4,
    schedule_name="constant",
    precision_compute="fp64", experts_balance="bias",
)  # fmt: skip
WITH_TWO = dict(parallel_ep=2, parallel_dp=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("experts") / "text.txt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """A run on two ranks with half of the experts each, never stopped."""
    run_dir = tmp_path_factory.mktemp("experts") / "whole"
    run(2, run_dir, text, **WITH_TWO, run_routing=STEPS)
    return run_dir


def run(num_ranks, run_dir, text, **changes):
    done = run_tiny(num_ranks, run_dir, text, **{**SETTINGS, **changes})
    assert done.returncode == 0, tail(done.output)
    return done


@LONG
def test_same_bits_with_the_experts_on_as_many_ranks(tmp_path, text, whole):
    pipelined = dict(
        parallel_pp=2,
        pipeline_schedule="zbv",
        parallel_zero=0,
        comm_transport="shared",
        memory_recompute="full",
    )
    run(4, tmp_path / "run", text, **WITH_TWO, **pipelined)
    assert loss_lines(tmp_path / "run") == loss_lines(whole)


@LONG
@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (2, dict(WITH_TWO, parallel_zero=3, parallel_reduce="step", comm_transport="messages")),
        pytest.param(1, dict(parallel_ep=1, parallel_dp=1), marks=LONG),
        pytest.param(
            4, dict(parallel_tp=2, parallel_etp=2, parallel_ep=2, parallel_dp=2, parallel_zero=3), marks=LONG
        ),
    ],
)
def test_resumes_from_the_middle_on_other_ranks(tmp_path, text, whole, num_ranks, changes):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}")
    done = run(num_ranks, tmp_path / "run", text, **changes, run_routing=STEPS)
    assert f"resuming after step {STEPS // 2}" in done.output, done.output
    assert f"recorded the routing of steps {STEPS // 2 + 1} to {STEPS}" in done.output, tail(done.output)
    if num_ranks == 2:
        assert loss_lines(tmp_path / "run") == loss_lines(whole)
        late, every = (dict(np.load(path / "routing.npz")) for path in (tmp_path / "run", whole))
        assert (late.pop("first_step"), every.pop("first_step")) == (STEPS // 2 + 1, 1)
        assert len(late) == len(every) == 4
        assert all((late[name] == every[name][STEPS // 2 :]).all() for name in every)
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-10)


def test_loads_are_recorded_and_drawn(whole):
    last = metrics(whole)[-1]
    assert list(last["expert_loads"]) == ["0", "1", "2", "3"] and last["dropped"] == 0
    for shares in last["expert_loads"].values():
        assert sum(shares) == pytest.approx(1)
    cv = [
        (sum((4 * share - 1) ** 2 for share in shares) / 4) ** 0.5 for shares in last["expert_loads"].values()
    ]
    assert last["load_cv"] == pytest.approx(sum(cv) / len(cv))
    assert 0 < last["load_entropy"] < 1
    picture = (whole / "loads.svg").read_text()
    assert picture.count("h-60.0") == 16, picture  # experts of four blocks
    assert f"loads in step {last['step']}" in picture


@LONG
def test_a_recorded_routing_is_replayed(tmp_path, text, whole):
    replayed = dict(experts_replay=whole / "routing.npz", run_steps=STEPS + 1)
    done = run(2, tmp_path / "again", text, parallel_tp=2, parallel_ep=2, experts_buffer=0.4, **replayed)
    said = (
        f"experts.replay has steps 1 to {STEPS}: the others take these in turn, step {STEPS + 1} goes where "
        "step 1 went"
    )
    assert done.output.index(said) < done.output.index("step 1 "), tail(done.output)
    assert losses(tmp_path / "again")[:STEPS] == pytest.approx(losses(whole), rel=1e-10)
    assert metrics(tmp_path / "again")[STEPS]["expert_loads"] == metrics(whole)[-1]["expert_loads"]


@LONG
def test_a_replayed_trace_with_another_content_is_refused(tmp_path, text, whole):
    trace = tmp_path / "routing.npz"
    keys = dict(SETTINGS, experts_replay=tmp_path / "routing.npz", run_save_every=1)
    recorded = dict(np.load(whole / "routing.npz"))
    np.savez(trace, **recorded)
    run(1, tmp_path / "run", text, **keys | dict(run_steps=1))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    np.savez(trace, **{name: array[::-1] if array.ndim else array for name, array in recorded.items()})
    done = run_tiny(1, tmp_path / "run", text, **keys | dict(run_steps=2))
    assert done.returncode == 2, tail(done.output)
    assert f"trained with another content of experts.replay = {trace}" in done.output, tail(done.output)
    assert "Traceback" not in done.output
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    np.savez_compressed(trace, **recorded)
    done = run(1, tmp_path / "run", text, **keys | dict(run_steps=2))
    assert "resuming after step 1" in done.output, tail(done.output)


def metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir):
    return [line["loss"] for line in metrics(run_dir) if "loss" in line]

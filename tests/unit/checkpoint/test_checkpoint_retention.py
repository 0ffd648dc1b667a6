"""Which steps stay: those that were asked for, never fewer than the newest good one, whatever is
damaged, replaced or killed.
"""

import json
import os
import random
from functools import partial

import numpy as np
import pytest
from checkpoints import killed_at, meta_of
from conftest import WITH_LONG

from mpitrain.checkpoint.load import open_latest, steps
from mpitrain.checkpoint.retention import Policy, Retention, best_step
from mpitrain.checkpoint.save import begin, commit, write_shard
from mpitrain.errors import CheckpointError


def save(folder, step, loss=None, **more):
    tmp = begin(folder, step)
    write_shard(tmp, 0, {"parameters/w": np.full(10, step, np.float32)})
    return commit(tmp, meta_of(step) | {"val_loss": loss} | more)


@pytest.fixture
def folder(tmp_path):
    """Steps 10 to 70; the losses of 20 and 50 are the least, 40 has none."""
    for step, loss in zip(range(10, 80, 10), (5.0, 1.0, 4.0, None, 1.0, 3.0, 2.0)):
        save(tmp_path, step, loss)
    return tmp_path


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (Policy(), [10, 20, 30, 40, 50, 60, 70]),
        (Policy(1), [70]),
        (Policy(2), [60, 70]),
        (Policy(9), [10, 20, 30, 40, 50, 60, 70]),
        (Policy(1, every=30), [30, 60, 70]),
        (Policy(1, best=1), [50, 70]),
        (Policy(1, best=2), [20, 50, 70]),
        (Policy(1, best=9), [10, 20, 30, 50, 60, 70]),
        (Policy(2, every=30, best=1), [30, 50, 60, 70]),
        (Policy(1, back=40), [40, 70]),
        (Policy(1, back=35), [70]),
        (Policy(1, back=80), [70]),
        (Policy(1, back=30), [60, 70]),
    ],
)
def test_what_is_asked_for_is_kept(folder, policy, kept):
    removed = Retention(folder, policy).prune(70, 2.0)
    assert steps(folder) == kept
    assert sorted(kept + removed) == [10, 20, 30, 40, 50, 60, 70]
    assert sorted(os.listdir(folder)) == [f"step-{step:08d}" for step in kept]


def test_a_run_that_prunes_after_each_save_keeps_what_one_look_at_all_would(tmp_path):
    dice = random.Random(1)
    retention = Retention(tmp_path, Policy(2, every=50, best=2))
    losses = {step: dice.choice([None, dice.random()]) for step in range(10, 210, 10)}
    for step, loss in losses.items():
        save(tmp_path, step, loss)
        retention.prune(step, loss)
        assert step in steps(tmp_path)
    assert set(steps(tmp_path)) == retention.policy.kept(losses)


def test_later_steps_of_before_a_run_went_back_are_neither_counted_nor_removed(folder):
    for name in ("step-00000060", "step-00000070"):
        (folder / name / "index.h5").unlink()
    save(folder, 50, 1.0)  # the run went on from 40
    assert Retention(folder, Policy(1)).prune(50, 1.0) == [10, 20, 30, 40]
    assert steps(folder) == [50, 60, 70]


def test_a_damaged_step_counts_for_nothing_and_stays(folder):
    (folder / "step-00000060" / "shard-00000.h5").write_bytes(b"torn")
    assert Retention(folder, Policy(2)).prune(70, 2.0) == [10, 20, 30, 40]
    assert steps(folder) == [50, 60, 70]


def test_a_step_that_is_known_to_be_damaged_counts_for_nothing_until_it_is_saved_again(folder):
    retention = Retention(folder, Policy(2), {60})
    assert retention.prune(70, 2.0) == [10, 20, 30, 40]
    assert steps(folder) == [50, 60, 70]
    save(folder, 60, 1.0)  # the run went on from 50
    assert retention.prune(60, 1.0) == []
    save(folder, 80)
    assert retention.prune(80, None) == [50, 60]


def test_a_step_that_stepped_aside_is_removed_by_its_other_name(folder):
    (folder / "step-00000010").rename(folder / "step-00000010.old")
    assert Retention(folder, Policy(6)).prune(70, 2.0) == [10]
    assert not list(folder.glob("step-00000010*"))


def test_killed_at_every_call_of_a_removal_leaves_whole_steps(tmp_path):
    events = 0
    while True:
        folder = tmp_path / str(events)
        for step in (10, 20, 30):
            save(folder, step)
        retention = Retention(folder, Policy(1))
        if not killed_at(events, partial(retention.prune, 30, None)):
            break
        for step in reversed(steps(folder)):  # each that is still called a step is one
            with open_latest(folder, warn=pytest.fail) as checkpoint:
                assert checkpoint.step == step and (checkpoint.read("parameters/w") == step).all()
            os.rename(folder / f"step-{step:08d}", tmp_path / f"seen-{events}-{step}")
        save(folder, 40)  # the next life
        assert os.listdir(folder) == ["step-00000040"]
        events += 1 if WITH_LONG else 3
    assert events > 10 and steps(folder) == [30]


def test_the_best_step_has_the_least_loss_and_is_whole(folder, tmp_path_factory):
    assert best_step(folder) == 50
    shard = folder / "step-00000050" / "shard-00000.h5"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert best_step(folder) == 20
    empty = tmp_path_factory.mktemp("empty")
    save(empty, 10)
    with pytest.raises(CheckpointError, match="found no intact step that was validated"):
        best_step(empty)


def test_the_best_step_by_a_metric_has_the_highest_accuracy_or_the_least_of_others(tmp_path):
    for step, acc, perplexity in ((10, 0.5, 3.0), (20, 0.75, 2.0), (30, 0.75, 2.5), (40, None, 1.0)):
        save(tmp_path, step, evaluations={"a/b": {"acc": acc, "perplexity": perplexity}})
    assert best_step(tmp_path, "best:a/b/acc") == 30  # of equal ones the later
    assert best_step(tmp_path, "best:a/b/perplexity") == 40
    with pytest.raises(CheckpointError, match=r"metric c/acc, but a/b/acc, a/b/perplexity"):
        best_step(tmp_path, "best:c/acc")
    retention = Retention(tmp_path, Policy(1, best=1, by="a/b/acc"))
    assert retention.prune(40, retention.loss({"evaluations": {"a/b": {"acc": 0.1}}})) == [10, 20]


def test_the_best_step_by_a_metric_of_metrics_or_evaluations(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0)):
        save(folder, step, loss)
    lines = [
        {
            "step": step,
            "load_cv": cv,
            "tokens_per_s": 100 * step,
            "lr": True,
            "evaluations": {"web": {"loss": -cv}},
        }
        for step, cv in ((10, 0.3), (20, 0.1), (20, 0.4), (25, 0.0), (30, 0.35))
    ]  # of two lines of step 20 the later counts; nothing is saved of 25
    text = (
        "\n".join(
            [
                *map(json.dumps, lines),
                "[]",
                '{"step": 11, "evaluations": 3}',
                '{"step": 20, "evaluations": []}',
                "cut",
            ]
        )
        + "\n"
    )
    (tmp_path / "metrics.jsonl").write_text(text)
    texts = {"a.txt": {"loss": 1.0, "tokens": 9}}
    results = [{"step": 10, "tasks": {"x/own.jsonl": {"acc": 0.5}}, "data": texts},
               {"step": 20, "tasks": {"own.jsonl": {"acc": 0.25}, "bad": 3}, "data": []}]  # fmt: skip
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(result) + "\n" for result in results))
    best = {
        "load_cv": 10,
        "tokens_per_s": 30,
        "web/loss": 20,
        "own/acc": 10,
        "a.txt/loss": 10,
        "val_loss": 10,
    }
    assert {name: best_step(folder, f"best:{name}") for name in best} == best
    known = "load_cv, tokens_per_s, val_loss, a.txt/loss, own/acc, web/loss"
    with pytest.raises(CheckpointError, match=f"metric lr, but {known}; use one"):
        best_step(folder, "best:lr")
    save(folder, 40, kept_by={"load_cv": 9.0})  # what checkpoints say counts, where one says it
    assert best_step(folder, "best:load_cv") == 40
    retention = Retention(folder, Policy(1, best=1, by="load_cv"))
    assert retention.prune(40, retention.loss({"kept_by": {"load_cv": 9.0}})) == [10, 20, 30]

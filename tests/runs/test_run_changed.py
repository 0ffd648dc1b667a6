"""Copies of a run that resume with another batch, sequence length or precision (docs/guides/resuming.md)."""

import json
import re
import shutil
import tomllib

import pytest
import tomli_w
from launch import MPITRAIN, mpirun, run_commands, run_tiny, tail, tiny, write_text

# weights don't move, so the loss of a step names the sequences that it has read
STILL = dict(
    optimizer_lr=1e-300, schedule_name="constant", schedule_warmup=0, precision_compute="fp64", batch_micro=1,
    model_layers=2, model_width=16, model_ffn=32, run_eval_every=0, run_eval_batches=1, run_preflight="off",
)  # fmt: skip
PRECISE = 1e-12


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A corpus of some 22 sequences of 64 tokens, so that runs go through several epochs."""
    return write_text(tmp_path_factory.mktemp("changed") / "text.txt", 1_500)


def begun(run_dir, text, **settings):
    done = run_tiny(1, run_dir, text, **settings)
    assert done.returncode == 0, tail(done.output)
    return run_dir


def losses(run_dir, key="loss"):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line.get(key) for line in lines if "loss" in line}


def resumed(run_dir, target, steps, says="", **changes):
    """Copy a run, change keys of its config.toml as an editor does, resume it, and return the copy."""
    shutil.copytree(run_dir, target)
    config = target / "config.toml"
    text = config.read_text()
    for key, value in {**changes, "dir": str(target)}.items():
        text = re.sub(rf"(?m)^{key} = .*", f"{key} = {json.dumps(value)}", text, count=1)
    config.write_text(text)
    done = mpirun(1, MPITRAIN, "run", str(config), "--set", f"run.steps={steps}")
    assert done.returncode == 0 and says in done.output, tail(done.output)
    return target


def whole(run_dir, text, num_sequences, length):
    """Return the loss of each sequence, of a run that reads one a step and that nobody changed."""
    begun(run_dir, text, **STILL, batch_global=1, run_steps=num_sequences, data_sequence=length)
    return list(losses(run_dir).values())


def test_the_place_in_the_data_stays_through_changes_of_batch_sequence_and_steps(tmp_path, text):
    """No batch divides the other, and two epochs end on the way."""
    wanted = whole(tmp_path / "whole", text, 59, 64)
    run = begun(tmp_path / "run0", text, **STILL, batch_global=8, run_steps=2, data_sequence=64)
    place, step = 16, 2
    for number, (batch, num_steps) in enumerate([(6, 2), (10, 1), (7, 3)], start=1):
        run = resumed(run, tmp_path / f"run{number}", step + num_steps, **{"global": batch})
        for _ in range(num_steps):
            step += 1
            mean = sum(wanted[place : place + batch]) / batch
            assert losses(run)[step] == pytest.approx(mean, rel=PRECISE), (batch, step)
            place += batch
    tokens = losses(run, "tokens")[step]
    assert (place, tokens) == (59, 59 * 64)
    first = -(-tokens // 40)  # the first whole sequence after what was read
    assert first * 40 != tokens
    shorter = whole(tmp_path / "shorter", text, first + 7, 40)
    run = resumed(run, tmp_path / "run4", step + 1, sequence=40)
    assert losses(run)[step + 1] == pytest.approx(sum(shorter[first:]) / 7, rel=PRECISE)
    assert losses(run, "tokens")[step + 1] == tokens + 7 * 40


def test_a_copy_in_another_precision_keeps_its_state_and_has_a_loss_scale_of_its_own(tmp_path, text):
    """Its oracle: a run in fp32 that nobody changed. A wrong scale is a factor of 256 in the norm.

    Weights and moments are stored in fp32, fp64 and bf16 on the way.
    """
    settings = dict(
        model_layers=2, data_sequence=32, run_eval_every=0, run_eval_batches=1, run_preflight="off",
        run_save_every=2, schedule_name="constant",
    )  # fmt: skip
    begun(tmp_path / "plain", text, **settings, run_steps=10, precision_compute="fp32")
    run = begun(tmp_path / "run0", text, **settings, run_steps=2, precision_compute="fp32")
    kinds = [("fp16", "fp32"), ("bf16", "bf16"), ("fp64", "fp32"), ("fp16", "fp32")]
    for number, (compute, moments) in enumerate(kinds, start=1):
        changes = dict(compute=compute, moments=moments)
        run = resumed(run, tmp_path / f"run{number}", 2 + 2 * number, **changes)
    norms, plain = losses(run, "grad_norm"), losses(tmp_path / "plain", "grad_norm")
    assert norms == {step: pytest.approx(norm, rel=0.05) for step, norm in plain.items()}
    scales = losses(run, "loss_scale")
    assert [scales[2 * number] for number in range(1, 6)] == [None, 256, None, None, 256]


def test_a_copy_is_what_its_keys_say_also_those_that_were_derived(tmp_path, text):
    """The batch was left open, so its derived value stands in config.toml, too, below the edited key."""
    settings = {**STILL, "batch_global": 0, "optimizer_lr": 1e-3, "data_sequence": 64}
    run = begun(tmp_path / "run0", text, **settings, run_steps=1)
    says = "step 1 had 1.00e-03, step 2 has 5.00e-04, since optimizer.lr changed"
    run = resumed(run, tmp_path / "run1", 2, says, lr=5e-4, **{"global": 6})
    assert losses(run, "tokens") == {1: 24 * 64, 2: 30 * 64}


def test_a_copy_that_is_another_model_or_has_another_optimiser_is_refused_in_its_words(tmp_path, text):
    """Nothing of a step is left out in silence, and what was derived from an edited key isn't compared."""
    run = begun(tmp_path / "run", text, **STILL, batch_global=4, run_steps=1, data_sequence=64)
    refused = [
        ("layers", 1, "has arrays that this model lacks: blocks.1.attention.k.weight, "),
        ("tied", False, "has no parameters/head.weight; it is not a checkpoint of this model"),
        ("frozen", ["embedding.weight"], "resuming after step 1"),
        ("name", "sgd", "has no sgd/momentum/blocks.0.attention.k.weight, "),
    ]
    commands = []
    for number, (key, value, _) in enumerate(refused):
        tables = tomllib.loads((run / "config.toml").read_text())
        tables["model" if key in ("layers", "tied") else "optimizer"][key] = value
        tables["run"] |= {"dir": str(tmp_path / f"copy{number}"), "steps": 2}
        shutil.copytree(run, tables["run"]["dir"])
        config = tmp_path / f"copy{number}" / "config.toml"
        config.write_text(tomli_w.dumps(tables))
        commands.append(["run", str(config)])
    for done, (*change, says) in zip(run_commands(1, *commands), refused):
        assert says in done.output, (change, tail(done.output, 5))
        assert done.returncode == (0 if "resuming" in says else 2)


def test_fewer_steps_than_a_run_has_done_are_refused_and_change_nothing(tmp_path, text):
    run = tmp_path / "run"
    first = run_tiny(1, run, text, run_steps=3)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    again = mpirun(1, MPITRAIN, "run", *tiny(run, text, run_steps=2, schedule_steps=9))
    assert (first.returncode, again.returncode) == (0, 2), tail(again.output)
    assert "run.steps = 2, but " in again.output and "has done 3 steps" in again.output
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before

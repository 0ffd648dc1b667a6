"""With every optimiser, a run resumes from its checkpoint in another division of the state, with
the bits of the run without a stop.
"""

import json

import pytest
from conftest import EVERY, LONG, WITH_LONG
from launch import loss_lines, run_commands, tail, tiny, write_text

KEYS = dict(run_save_every=4, run_eval_every=4, schedule_name="constant", parallel_dp=2)
STEPS = 10
DIVIDED = [("muon", "bf16"), ("sgd", "fp32"), *([("muon", "fp32"), ("adamw", "bf16")] if EVERY else [])]
CHOSEN = DIVIDED if WITH_LONG else []


# run directory, steps, zero
DIVISIONS = [("whole", STEPS, 1), ("stopped", 4, 3), ("stopped", 8, 0), ("stopped", STEPS, 2)]
MOMENTS = dict(optimizer_moments="bf16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where runs are."""
    return tmp_path_factory.mktemp("optimizers")


@pytest.fixture(scope="module")
def ended(folder):
    """{run: what each command on it said}.

    Two mpiruns for all: one rank, and then two that resume, too, with what that one saved.
    """
    text = write_text(folder / "text.txt")
    one = [("moments", 3), ("moments whole", 6)]
    alone = [
        tiny(folder / name, text, **KEYS | dict(parallel_dp=1, run_steps=steps) | MOMENTS)
        for name, steps in one
    ]
    both = [
        (
            run,
            steps,
            KEYS
            | dict(
                optimizer_name=name, optimizer_moments=moments, parallel_zero=zero, parallel_reduce="step"
            ),
        )
        for name, moments in CHOSEN
        for run, steps, zero in [
            (f"{name} {moments} {which}", steps, zero) for which, steps, zero in DIVISIONS
        ]
    ]
    both += [
        ("moments", 6, KEYS | dict(parallel_dp=1, parallel_pp=2) | MOMENTS),
        ("moments", 8, KEYS | dict(parallel_dp=1, parallel_pp=2)),
    ]
    done = run_commands(1, *(("run", *each) for each in alone))
    done += run_commands(
        2,
        *(("run", *tiny(folder / run, text, run_steps=steps, **keys)) for run, steps, keys in both),
        timeout=180,
    )
    found = {}
    for name, each in zip([name for name, _ in one] + [run for run, _, _ in both], done, strict=True):
        found.setdefault(name, []).append(each)
    return found


@LONG
@pytest.mark.parametrize(("name", "moments"), DIVIDED)
def test_a_run_resumes_in_another_division_with_the_same_bits(folder, ended, name, moments):
    whole, stopped = (f"{name} {moments} {which}" for which in ("whole", "stopped"))
    assert all(done.returncode == 0 for done in ended[whole] + ended[stopped]), "".join(
        tail(done.output) for done in ended[stopped]
    )
    assert "resuming after step 8" in ended[stopped][-1].output
    lines = loss_lines(folder / whole)
    assert loss_lines(folder / stopped) == lines
    losses = [json.loads(line)["val_loss"] for line in (lines[0], lines[-1])]
    assert losses[1] < losses[0]


@LONG
def test_bf16_moments_are_saved_as_such_and_resume_as_nothing_else(folder, ended):
    import h5py

    from mpitrain.checkpoint.dtypes import BF16, to_hdf5

    (first, on_two, refused), (whole,) = ended["moments"], ended["moments whole"]
    assert not first.returncode, tail(on_two.output)
    assert not on_two.returncode, tail(on_two.output)
    assert not whole.returncode, tail(on_two.output)
    losses = [
        [json.loads(line).get("loss") for line in loss_lines(folder / run)]
        for run in ("moments", "moments whole")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 7
    with h5py.File(folder / "moments" / "checkpoints" / "step-00000006" / "shard-00000.h5") as shard:
        are_bf16 = {}
        bf16 = to_hdf5(BF16)  # h5py itself calls it float32

        def look(name, entry):
            if isinstance(entry, h5py.Dataset):
                are_bf16.setdefault(name.split("/")[0], set()).add(entry.id.get_type() == bf16)

        shard.visititems(look)
    assert are_bf16["adam"] == {True} and are_bf16["parameters"] == {False}
    said = "holds a run with optimizer.moments = 'bf16', this one has 'fp32'"
    assert refused.returncode == 2, tail(refused.output)
    assert said in refused.output, tail(refused.output)
    assert "Traceback" not in refused.output, tail(refused.output)

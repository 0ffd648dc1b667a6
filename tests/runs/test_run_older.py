"""A run begun by an older version resumes with its tokens, its split and its order.

tests/golden/run-form-1 has what one has left after step 2.

There a text's own NUL bytes were ends of documents, validation was the tail, and metrics.jsonl has
the steps that came next.

tests/golden/run-order-sorted has what one has left after step 10 of 20, in the first of two epochs; its
metrics.jsonl has all steps.
"""

import json
import shutil
from pathlib import Path

import pytest
from conftest import LONG
from folders import GOLDEN
from launch import MPITRAIN, mpirun, run_tiny, tail, write_text

from mpitrain.checkpoint.load import open_step
from mpitrain.errors import CheckpointError
from mpitrain.training.same_past import order_of
from mpitrain.training.saving.newest import Newest

OLDER = GOLDEN / "run-form-1"
SORTED = GOLDEN / "run-order-sorted"


@pytest.fixture
def older(tmp_path):
    shutil.copytree(OLDER, tmp_path / "run")
    (tmp_path / "run" / "corpus.jsonl").rename(tmp_path / "corpus.jsonl")
    return tmp_path / "run"


def numbers(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [[line.get(key, 0.0) for key in ("step", "loss", "grad_norm", "val_loss")] for line in lines]


def test_a_run_of_form_1_resumes_as_it_would_have(older):
    done = mpirun(
        1, MPITRAIN, "run", str(older / "config.toml"), "--set", f"run.dir={older}", cwd=older.parent
    )
    assert done.returncode == 0 and "resuming after step 2" in done.output, tail(done.output)
    assert numbers(older) == [pytest.approx(line, rel=1e-4) for line in numbers(OLDER)]
    assert (older / "data" / "tokens.bin").read_bytes() == (OLDER / "data" / "tokens.bin").read_bytes()


def test_damaged_tokens_of_form_1_are_not_replaced_by_others(older):
    """Made anew, they would be others: the text's NUL is written otherwise."""
    (older / "data" / "tokens.bin").write_bytes(b"x" + (OLDER / "data" / "tokens.bin").read_bytes()[1:])
    done = mpirun(
        1, MPITRAIN, "run", str(older / "config.toml"), "--set", f"run.dir={older}", cwd=older.parent
    )
    assert done.returncode == 2 and "trained on other data" in done.output, tail(done.output)


# --------------------------------------------------------- the order of an epoch


@pytest.fixture
def sorted_run(tmp_path):
    shutil.copytree(SORTED, tmp_path / "run")
    (tmp_path / "run" / "text.txt").rename(tmp_path / "text.txt")
    return tmp_path / "run"


def run(config, run_dir, *settings, ranks=1):
    words = [word for each in (f"run.dir={run_dir}", *settings) for word in ("--set", each)]
    return mpirun(ranks, MPITRAIN, "run", str(config), *words, cwd=run_dir.parent)


def order_in(run_dir, step):
    with open_step(run_dir / "checkpoints", step) as checkpoint:
        return checkpoint.meta["order"]


@pytest.mark.parametrize("settings", [(), pytest.param(("data.order=sorted",), marks=LONG)])
def test_a_run_resumes_in_the_order_it_has_begun_with(sorted_run, settings):
    """Over the end of an epoch; and from a checkpoint of its own, later."""
    for steps in (14, 20):
        done = run(sorted_run / "config.toml", sorted_run, f"run.steps={steps}", *settings)
        assert done.returncode == 0 and "resuming after step" in done.output, tail(done.output)
        assert "in the order sorted" in done.output
    # the last entry, a validation loss, is there after step 14, too, where the run ended
    trained = [line[:3] for line in numbers(sorted_run)]
    assert trained == [pytest.approx(line[:3], rel=1e-4) for line in numbers(SORTED)]
    assert order_in(sorted_run, 20) == "sorted"
    for step in (10, 20):  # without a note of it, and with one
        path = sorted_run / "checkpoints" / f"step-{step:08d}"
        done = mpirun(0, MPITRAIN, "ckpt", "inspect", str(path))
        assert ", order sorted" in done.output, tail(done.output)


@LONG
def test_a_new_run_has_the_losses_of_before_if_it_asks_for_their_order(sorted_run):
    for name, settings in (("asked", ("data.order=sorted",)), ("new", ())):
        done = run(sorted_run / "config.toml", sorted_run.with_name(name), *settings)
        assert done.returncode == 0, tail(done.output)
    before = [pytest.approx(line, rel=1e-4) for line in numbers(SORTED)]
    assert numbers(sorted_run.with_name("asked")) == before
    new = numbers(sorted_run.with_name("new"))
    assert new[0] == before[0] and new[1] != before[1]
    assert order_in(sorted_run.with_name("new"), 20) == "feistel"


def test_a_run_without_a_checkpoint_starts_again_in_the_new_order(sorted_run):
    """None of its steps is kept, nor are their lines."""
    shutil.rmtree(sorted_run / "checkpoints")
    done = run(sorted_run / "config.toml", sorted_run)
    assert done.returncode == 0 and "in the order feistel" in done.output, tail(done.output)
    assert len(numbers(sorted_run)) == 21 and order_in(sorted_run, 20) == "feistel"


def test_a_run_never_changes_its_order(sorted_run):
    done = run(sorted_run / "config.toml", sorted_run, "data.order=feistel")
    assert done.returncode == 2, tail(done.output)
    assert (
        f'{sorted_run}/checkpoints: trained with data.order = "sorted", this run has "feistel"; leave '
        "data.order out, or choose another run.dir"
    ) in done.output


def test_an_order_of_a_later_version_is_refused():
    with pytest.raises(
        CheckpointError, match=r"in the order shuffled, known here are feistel, sorted; .* version"
    ):
        order_of(None, Newest(step=3, order="shuffled"), Path("run/checkpoints"))


# --------------------------------------------------------- what lies elsewhere, or nowhere any more


def resumed(run_dir, path, steps, **changes):
    """Resume a run for some more steps."""
    return run_tiny(1, run_dir, path, run_steps=steps, run_save_every=2, schedule_name="constant", **changes)


def assert_resumes(run_dir, path, steps, **changes):
    done = resumed(run_dir, path, steps, **changes)
    assert done.returncode == 0 and "resuming after step" in done.output, tail(done.output)
    return done


@LONG
def test_a_corpus_may_move_and_be_removed(tmp_path):
    (tmp_path / "a").mkdir()
    write_text(tmp_path / "a" / "t.txt", 20_000)
    assert resumed(tmp_path / "run", tmp_path / "a", 2).returncode == 0
    (tmp_path / "a").rename(tmp_path / "b")
    assert "using the tokens in" in assert_resumes(tmp_path / "run", tmp_path / "a", 3).output
    assert_resumes(tmp_path / "run", tmp_path / "b", 4)
    (tmp_path / "a").symlink_to("b")
    assert_resumes(tmp_path / "run", f"{tmp_path}/./a", 5)
    shutil.copyfile(tmp_path / "b" / "t.txt", tmp_path / "copy.txt")  # another name, another time
    assert_resumes(tmp_path / "run", tmp_path / "copy.txt", 6)
    write_text(tmp_path / "copy.txt", 20_001)
    done = resumed(tmp_path / "run", tmp_path / "copy.txt", 7)
    assert done.returncode == 2 and "trained on other data" in done.output, tail(done.output)
    done = resumed(tmp_path / "new", tmp_path / "gone", 2)
    assert done.returncode == 2, tail(done.output)
    assert "gone cannot be read" in done.output, tail(done.output)
    assert not (tmp_path / "new").exists(), tail(done.output)


@LONG
def test_a_tokenizer_may_move_and_be_removed(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE(
            {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<fin>"])
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"eos_token": "<fin>"}')
    text = write_text(tmp_path / "t.txt", 20_000)
    named = tmp_path / "model" / "tokenizer.json"
    assert resumed(tmp_path / "run", text, 2, data_tokenizer=named).returncode == 0
    (tmp_path / "model").rename(tmp_path / "moved")
    assert "<fin> (256, " in assert_resumes(tmp_path / "run", text, 3, data_tokenizer=named).output
    assert_resumes(tmp_path / "run", text, 4, data_tokenizer=tmp_path / "moved" / "tokenizer.json")
    done = mpirun(0, MPITRAIN, "generate", str(tmp_path / "run"), "--prompt", "def ", "--tokens", "3")
    assert done.returncode == 0 and done.output.startswith("def "), tail(done.output)
    done = resumed(
        tmp_path / "run", text, 5, data_tokenizer=tmp_path / "moved" / "tokenizer.json", data_end_of_text='""'
    )
    assert done.returncode == 0, tail(done.output)  # one document: nothing is between
    done = resumed(tmp_path / "run", text, 6, data_tokenizer="bytes", model_vocab=257)
    assert done.returncode == 2 and "trained on other data" in done.output, tail(done.output)

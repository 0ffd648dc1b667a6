"""Trained from weights of others: frozen ones stay, rows that pad the vocabulary do nothing; an export is
whole or isn't there; what it must refuse.
"""

import errno
import json
import os
import signal
import subprocess
import time

import h5py
import numpy as np
import pytest
from conftest import LONG
from launch import MPITRAIN, environment, finished, mpirun, tail, write_text
from model_folders import folder

MUON = "optimizer.name=muon"
OTHER = [("model.layers=3", "leave it out"), ("model.vocab=40", "use more"), ("model.preset=x", "preset")]
SIZES = ["data.tokenizer=bytes", "data.sequence=32", "batch.global=4", "run.eval_batches=1"]
SIZES += ["precision.compute=fp64", "run.steps=3"]


def run(where, *settings, ranks=1):
    text = write_text(where.parent / "text")
    own = [*SIZES, f"run.dir={where}", "data.source=text", f"data.path={text}", *settings]
    words = ["run", *(word for each in own for word in ("--set", each))]
    if ranks > 1:
        done = mpirun(ranks, MPITRAIN, *words)
        assert done.returncode == 0, tail(done.output)
        return done.output
    done = finished([MPITRAIN, *words], timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def arrays(where, step=3):
    with h5py.File(where / f"checkpoints/step-{step:08d}/index.h5") as file:
        found = {}
        file.visititems(lambda name, x: found.update({name: x[()]}) if isinstance(x, h5py.Dataset) else None)
    return found


def losses(where):
    lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    return np.array([line.get("loss", line.get("val_loss")) for line in lines])


def command(*words):
    return finished([MPITRAIN, *map(str, words)], timeout=180, capture_output=True, text=True)


@pytest.fixture
def model(tmp_path):
    """A folder whose vocabulary has a row for each byte."""
    return folder(tmp_path / "model", vocabulary=300)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((1,), marks=LONG),
        (2, "parallel.zero=3"),
        pytest.param((2, "parallel.tp=2", MUON), marks=LONG),
    ],
)
def test_frozen_weights_stay_and_have_no_moments(tmp_path, model, layout):
    frozen = 'optimizer.frozen=["embedding.weight", "blocks.0.*"]'
    run(tmp_path / "run", f"model.init={model}", frozen, *layout[1:], ranks=layout[0])
    found = arrays(tmp_path / "run")
    import safetensors.numpy

    first = safetensors.numpy.load_file(model / "model.safetensors")
    assert np.array_equal(found["parameters/embedding.weight"], first["model.embed_tokens.weight"])
    q = "self_attn.q_proj.weight"
    assert np.array_equal(found["parameters/blocks.0.attention.q.weight"], first[f"model.layers.0.{q}"])
    assert not np.array_equal(found["parameters/blocks.1.attention.q.weight"], first[f"model.layers.1.{q}"])
    moments = [name for name in found if not name.startswith(("parameters/", "checkpoint"))]
    assert any("blocks.1." in name for name in moments)
    assert not [name for name in moments if "blocks.0." in name or "embedding" in name]


def test_a_pattern_that_no_weight_has_is_refused(model, tmp_path):
    frozen = ["--set", 'optimizer.frozen=["embeding.weight"]', "--set", "data.tokenizer=bytes"]
    done = command("check", "--set", f"model.init={model}", *frozen)
    assert done.returncode == 2 and "embedding.weight" in done.stderr


@pytest.mark.parametrize("layout", [pytest.param((1,), marks=LONG), (2, "parallel.tp=2")])
def test_rows_that_pad_the_vocabulary_are_never_predicted(tmp_path, model, layout):
    """300 rows of 2,048: with tp=2 one of the ranks has nothing else."""
    run(tmp_path / "plain", f"model.init={model}")
    padded = ("model.vocab_multiple=2048", "model.vocab=300")
    run(tmp_path / "padded", f"model.init={model}", *padded, *layout[1:], ranks=layout[0])
    assert np.abs(losses(tmp_path / "padded") - losses(tmp_path / "plain")).max() < 1e-10
    found = arrays(tmp_path / "padded")
    assert found["parameters/embedding.weight"].shape == (2048, 16)
    out = tmp_path / "made" / "for it" / "out"
    done = command("export", tmp_path / "padded", "--to", out, "--no-prove")
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 300
    import safetensors.numpy

    assert safetensors.numpy.load_file(out / "model.safetensors")["lm_head.weight"].shape == (300, 16)


@LONG
def test_a_run_resumes_where_the_folder_is_gone(tmp_path, model):
    settings = (f"model.init={model}", "model.vocab_multiple=64")
    run(tmp_path / "run", *settings)
    model.rename(tmp_path / "elsewhere")
    assert "resuming after step 3" in run(tmp_path / "run", *settings, "run.steps=4", "schedule.steps=3")


def test_a_run_begins_with_a_checkpoint_of_another(tmp_path, model):
    run(tmp_path / "one", f"model.init={model}")
    output = run(tmp_path / "two", f"model.init={tmp_path / 'one'}")
    assert "beginning with weights of" in output
    before = json.loads((tmp_path / "one/metrics.jsonl").read_text().splitlines()[-1])["val_loss"]
    assert abs(losses(tmp_path / "two")[0] - before) < 1e-12


def test_another_beginning_than_a_run_has_is_refused_and_its_record_stays(tmp_path, model):
    run(tmp_path / "one", "run.steps=1")
    run(tmp_path / "two", f"model.init={model}")
    for name, other in (("two", tmp_path / "one"), ("one", model), ("one", tmp_path / "nothing")):
        before = (tmp_path / name / "config.toml").read_text()
        done = command("run", "--set", f"run.dir={tmp_path / name}", "--set", f"model.init={other}")
        said = " ".join(done.stderr.split())  # lines are folded where the folder's name is long
        assert done.returncode == 2 and f"model.init = {other}: run.dir = " in said
        assert (tmp_path / name / "config.toml").read_text() == before
    model.rename(tmp_path / "elsewhere")
    output = " ".join(run(tmp_path / "two", "run.steps=4", "schedule.steps=3").split())
    assert f"model.init = {model} no longer exists" in output and "resuming after step 3" in output
    assert f'init = "{model}"' in (tmp_path / "two/config.toml").read_text()


def test_a_plan_is_of_the_model_that_a_run_begins_with(model):
    import safetensors.numpy

    tensors = safetensors.numpy.load_file(model / "model.safetensors")
    keys = ("--set", f"model.init={model}", "--set", "data.tokenizer=bytes")
    done = command("plan", *keys, "--ranks", 2, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] == sum(tensor.size for tensor in tensors.values())


@pytest.mark.parametrize(("key", "said"), OTHER)
def test_keys_that_say_another_model_are_refused(tmp_path, model, key, said):
    done = command("run", "--set", f"model.init={model}", "--set", key, "--set", f"run.dir={tmp_path / 'r'}")
    assert done.returncode == 2 and said in done.stderr and not (tmp_path / "r").exists()


def test_an_export_that_is_killed_leaves_nothing_by_its_name(tmp_path, model):
    """And the next one is whole."""
    assert command("import", model, "--to", tmp_path / "run").returncode == 0
    out = tmp_path / "out"
    for delay_s in (0.3, 0.6, 0.8, 1.0, 1.3):
        words = [MPITRAIN, "export", str(tmp_path / "run"), "--to", str(out), "--no-prove"]
        process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL)
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if out.exists():
            assert command("import", out, "--to", tmp_path / f"again-{delay_s}").returncode == 0
            return
    assert command("export", tmp_path / "run", "--to", out, "--no-prove").returncode == 0
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_an_export_that_does_not_reach_the_disk_is_refused_and_leaves_nothing(tmp_path, model, monkeypatch):
    """A file system over a network says so when a file is synced."""
    from mpitrain.cluster.team import TeamOfOne
    from mpitrain.errors import WeightsError
    from mpitrain.weights import exporting, syncing

    def fail(descriptor):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    assert command("import", model, "--to", tmp_path / "run").returncode == 0
    monkeypatch.setattr(syncing.os, "fsync", fail)
    options = exporting.ExportOptions(prove=False)
    with pytest.raises(WeightsError, match=r"model\.safetensors: Disk quota exceeded; free some space"):
        exporting.export(TeamOfOne(), str(tmp_path / "run"), str(tmp_path / "out"), options)
    assert sorted(os.listdir(tmp_path)) == ["model", "run"]


@pytest.mark.parametrize("known", ["none", "other"])
def test_without_the_digests_of_what_was_written_numbers_are_compared(tmp_path, model, monkeypatch, known):
    """As where ranks have written parts of a chunk; others are of a checkpoint that changed meanwhile."""
    from mpitrain.cluster.team import TeamOfOne
    from mpitrain.commands.weights import ExportOptions, export_step
    from mpitrain.weights.expected import ExpectedDigests, ExportDigests
    from mpitrain.weights.proof import ExportError

    assert command("import", model, "--to", tmp_path / "run").returncode == 0
    said = []

    def export(target):
        options = ExportOptions(dtype="bf16", prove=False)
        return export_step(TeamOfOne(), str(tmp_path / "run"), str(tmp_path / target), options, said.append)

    export("one")
    digests = {} if known == "none" else {"head.norm.weight": {0: bytes(16)}}
    monkeypatch.setattr(ExpectedDigests, "so_far", property(lambda self: ExportDigests(digests, 0.0)))
    if known == "other":
        with pytest.raises(ExportError, match=r"head\.norm\.weight changed while it was exported"):
            export("two")
        return
    export("two")
    tables = [[line for line in text.splitlines() if "time" not in line][1:] for text in said]
    assert tables[0] == tables[1] and "(the cast)" in said[1]


def test_a_target_that_is_there_is_left_as_it_is(tmp_path, model):
    assert command("import", model, "--to", tmp_path / "run").returncode == 0
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    done = command("export", tmp_path / "run", "--to", tmp_path / "out")
    assert done.returncode == 2 and "already exists" in done.stderr
    assert (tmp_path / "out/mine").read_text() == "mine"
    again = command("import", model, "--to", tmp_path / "run")
    assert again.returncode == 2 and "config.toml" in again.stderr


def test_an_export_into_what_belongs_to_a_run_is_refused(tmp_path, model):
    assert command("import", model, "--to", tmp_path / "run").returncode == 0
    for name in ("logs", "checkpoints/out"):
        done = command("export", tmp_path / "run", "--to", tmp_path / "run" / name)
        assert done.returncode == 2
        assert f"{name} belongs to the run in {tmp_path / 'run'};" in " ".join(done.stderr.split())
        assert not (tmp_path / "run" / name).exists()


def test_what_was_written_wrong_is_found(tmp_path, model, monkeypatch):
    """A tensor of the export is changed before it is read back."""
    from mpitrain.cluster.team import TeamOfOne
    from mpitrain.errors import FAILED
    from mpitrain.weights import exporting
    from mpitrain.weights.proof import ExportError

    assert command("import", model, "--to", tmp_path / "run").returncode == 0
    write = exporting.write_shard

    def wrongly(path, *given):
        write(path, *given)
        with open(path, "r+b") as file:
            file.seek(-40, os.SEEK_END)
            file.write(b"\x01")

    monkeypatch.setattr(exporting, "write_shard", wrongly)
    options = exporting.ExportOptions(prove=False)
    with pytest.raises(ExportError, match=r"lm_head|head\.weight") as caught:
        exporting.export(TeamOfOne(), str(tmp_path / "run"), str(tmp_path / "out"), options)
    assert caught.value.exit_code == FAILED and not (tmp_path / "out").exists()
    assert (tmp_path / "out.export.tmp").is_dir() and (tmp_path / "run/config.toml").exists()

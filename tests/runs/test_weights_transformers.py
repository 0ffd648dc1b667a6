"""Models that transformers has written give the same logits here; trained and exported, the same there."""

import json
import re
import shlex
import sys

import numpy as np
import pytest
from launch import MPITRAIN, finished, mpirun, tail, write_text
from tiny_transformers import CASES, TOKENS, distance, double, our_logits, save, their_logits

from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.errors import WeightsError

pytest.importorskip("transformers")
LAYOUTS = {  # of the families whose layers are divided in ways of their own
    "llama-one-kv-head": ("tp", "cp", "pp"),
    "llama-tied": ("tp", "pp"),
    "llama-dynamic": ("cp",),
    "gpt-oss": ("tp", "cp", "pp", "ep"),
    "deepseek-v3": ("tp", "cp", "pp", "ep"),
    "qwen3-moe": ("ep",),
    "mixtral": ("ep", "tp"),
    "glm-4.5": ("tp", "ep"),
}
TRAINED = (
    "llama3.1",
    "llama-dynamic",
    "llama-tied",
    "gpt-oss",
    "deepseek-v3",
    "qwen3-moe-some",
    "mixtral",
    "glm-4.5",
)
PAIRS = [(name, axis) for name, axes in LAYOUTS.items() for axis in axes]


def command(*words, **given):
    return finished([MPITRAIN, *map(str, words)], timeout=180, capture_output=True, text=True, **given)


def digest(output):
    return re.search(r"digest(?: of the weights)? ([0-9a-f]{32})", " ".join(output.split()))[1]


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(name, tmp_path):
    path = save(name, tmp_path / "model")
    expected, _ = their_logits(path)
    assert distance(our_logits(path), expected) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_in_fp64_they_agree_to_every_digit(name, tmp_path):
    path = save(name, tmp_path / "model", "float64")
    with double():
        expected, _ = their_logits(path, "float64")
    assert distance(our_logits(path, "fp64"), expected) < 1e-10


@pytest.mark.parametrize("name", ["llama3.1", "deepseek-v3", "gpt-oss"])
def test_weights_in_bf16_are_read_as_they_are(name, tmp_path):
    path = save(name, tmp_path / "model", "bfloat16")
    expected, _ = their_logits(path)
    assert distance(our_logits(path), expected) < 1e-5


def test_biases_of_routers_are_read_where_experts_have_some_and_are_zero_elsewhere(tmp_path):
    """experts.balance = "bias" has them. What isn't there is 0, as in exports of the other balances."""
    from safetensors.numpy import load_file, save_file

    path = save("deepseek-v3", tmp_path / "model")
    file = path / "model.safetensors"
    with pytest.raises(WeightsError, match=r"ffn.router.bias isn't 0.* experts.bias_rate = 0 it stays"):
        our_logits(path, experts={"balance": "none"})
    assert distance(our_logits(path, experts={"bias_rate": 0}), their_logits(path)[0]) < 1e-5
    weights = load_file(file)
    biases = [name for name in weights if name.endswith("e_score_correction_bias")]
    save_file({**weights, **{name: 0 * weights[name] for name in biases}}, file, {"format": "pt"})
    expected, wrong = their_logits(path)
    assert biases and not wrong
    for balance in ("none", "global", "bias"):
        assert distance(our_logits(path, experts={"balance": balance}), expected) < 1e-5
    save_file({name: x for name, x in weights.items() if name not in biases}, file, {"format": "pt"})
    for balance in ("sequence", "bias"):
        assert distance(our_logits(path, experts={"balance": balance}), expected) < 1e-5
    save_file({name: x for name, x in weights.items() if name != biases[0]}, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=f"1 tensor of the model is missing: {biases[0]}"):
        our_logits(path)


def settings(tmp_path, run, path, **changes):
    own = {
        "model.init": path,
        "run.dir": run,
        "data.source": "text",
        "data.path": write_text(tmp_path / "text"),
    }
    own |= {
        "data.tokenizer": "bytes",
        "data.sequence": 32,
        "batch.global": 4,
        "precision.compute": "fp64",
        "run.log_every": 1,
    }
    own |= {"run.eval_batches": 1, "comm.timeout_s": 60} | changes
    return [word for key, value in own.items() for word in ("--set", f"{key}={value}")]


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return np.array([line.get("loss", line.get("val_loss")) for line in lines])


@pytest.mark.parametrize(("name", "axis"), PAIRS)
def test_every_layout_begins_with_the_same_weights(name, axis, tmp_path):
    """The validation before the first step, and the first steps, are those of one rank."""
    path = save(name, tmp_path / "model", "float64")
    steps = {"run.steps": 2, "run.save_every": 0}
    one = command("run", *settings(tmp_path, tmp_path / "one", path, **steps))
    assert one.returncode == 0, tail(one.stderr)
    layout = {f"parallel.{axis}": 2, **({"parallel.dp": 2} if axis == "ep" else {})}
    two = mpirun(2, MPITRAIN, "run", *settings(tmp_path, tmp_path / "two", path, **steps, **layout))
    assert two.returncode == 0, tail(two.output)
    assert distance(losses(tmp_path / "two"), losses(tmp_path / "one")) < 1e-10


@pytest.mark.parametrize("name", TRAINED)
def test_trained_and_exported_it_is_what_transformers_loads(name, tmp_path):
    """Train 20 steps of it on two ranks, export, load, import again."""
    path = save(name, tmp_path / "model")
    run = tmp_path / "run"
    steps = {"run.steps": 20, "precision.compute": "fp32", "parallel.zero": 3, "optimizer.lr": 1e-3}
    trained = mpirun(2, MPITRAIN, "run", *settings(tmp_path, run, path, **steps))
    assert trained.returncode == 0, tail(trained.output)
    out = tmp_path / "out"
    done = command("export", run, "--to", out, "--no-prove")
    assert done.returncode == 0, done.stderr
    assert "0 unused" in done.stdout and "largest difference  0\n" in done.stdout
    expected, wrong = their_logits(out)
    assert not wrong
    assert distance(our_logits(out), expected) < 1e-5
    assert distance(expected, their_logits(path)[0]) > 1e-3
    again = command("import", out, "--to", tmp_path / "again")
    assert again.returncode == 0, again.stderr
    assert digest(again.stdout) == digest(done.stdout)


def test_the_proof_passes_over_weights_that_have_no_numbers(tmp_path):
    path = save("deepseek-v3-none-shared", tmp_path / "model")
    assert command("import", path, "--to", tmp_path / "run").returncode == 0
    done = command("export", tmp_path / "run", "--to", tmp_path / "out", "--prove")
    assert done.returncode == 0, done.stderr
    assert "as transformers 5." in done.stdout


def test_the_proof_has_transformers_compute_the_logits(tmp_path):
    path = save("llama3.1", tmp_path / "model", "bfloat16")
    run = tmp_path / "run"
    assert command("import", path, "--to", run).returncode == 0
    done = command("export", run, "--to", tmp_path / "out", "--prove")
    assert done.returncode == 0, done.stderr
    proof = " ".join(done.stdout.split())
    assert "as transformers 5." in proof and "over 48 tokens" in proof
    found = {name: (tmp_path / "out" / name).read_bytes() for name in ("model.safetensors", "config.json")}
    import safetensors.numpy  # the reference implementation reads the file, too

    assert len(safetensors.safe_open(tmp_path / "out" / "model.safetensors", "numpy").keys()) == 30
    assert json.loads(found["config.json"])["dtype"] == "bfloat16"
    assert np.array_equal(our_logits(tmp_path / "out"), our_logits(path))
    assert len(TOKENS[0]) == 20


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_proof_says_where_transformers_reads_another_tokenizer(family, tmp_path):
    """In a folder of qwen2 AutoTokenizer makes Qwen's own of any tokenizer.json."""
    from exported_models import TEXT, byte_fallback_tokenizer

    byte_fallback_tokenizer().save(str(tmp_path / "own.json"))
    (tmp_path / "text").write_text(TEXT * 20)
    sizes = {"model.family": family, "model.layers": 1, "model.width": 32, "model.heads": 2, "model.ffn": 32}
    texts = {"data.source": "text", "data.path": tmp_path / "text", "data.tokenizer": tmp_path / "own.json"}
    keys = {**sizes, **texts, "data.sequence": 32, "run.steps": 1, "run.dir": tmp_path / "run"}
    trained = command("run", *(word for key, value in keys.items() for word in ("--set", f"{key}={value}")))
    assert trained.returncode == 0, trained.stderr
    done = command("export", tmp_path / "run", "--to", tmp_path / "out", "--prove")
    assert done.returncode == 0, done.stderr
    said = "makes other tokens of" in done.stdout and "PreTrainedTokenizerFast.from_pretrained" in done.stdout
    assert said == (family == "qwen2"), done.stdout


def test_the_conversion_of_an_older_tokenizer_that_is_printed_is_one(tmp_path):
    """GPT-2's vocab.json and merges.txt; the ids are those of transformers."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

    path = tmp_path / "it's a model"
    text = "some words, which are some words more\n" * 200
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([text], vocab_size=290, special_tokens=["<|endoftext|>"], show_progress=False)
    sizes = dict(n_embd=32, n_layer=1, n_head=2, n_positions=64)
    GPT2LMHeadModel(GPT2Config(vocab_size=290, **sizes)).save_pretrained(path)
    trained.save_model(str(path))
    words = ["--set", f"model.init={path}", "--set", "batch.global=4", "--ranks", "1"]
    refused = finished([MPITRAIN, "check", *words], timeout=60, capture_output=True, text=True, cwd=tmp_path)
    assert refused.returncode == 2 and "vocab.json, merges.txt, which isn't read here" in refused.stderr
    said = " ".join(refused.stderr.split())
    convert, give = re.fullmatch(r".*convert it by python (.*), and give (--set .*)", said).groups()
    done = finished([sys.executable, *shlex.split(convert)], timeout=120, capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    given = [*words, *shlex.split(give)]
    done = finished([MPITRAIN, "check", *given], timeout=60, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    ours = load_tokenizer(tmp_path / shlex.split(give)[1].partition("=")[2])
    sample = "words more, é some"
    assert ours.encode(sample.encode()).tolist() == GPT2Tokenizer.from_pretrained(path)(sample)["input_ids"]

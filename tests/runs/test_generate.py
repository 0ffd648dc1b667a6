"""Sampling: at every temperature, only tokens that the tokenizer has, and from run directories that
are a stranger's.
"""

import json
import os
import shutil
import sys
import tomllib

import numpy as np
import pytest
from launch import run_commands, write_text
from sampling_runs import command, make_run, text

from mpitrain.data.corpus import Corpus
from mpitrain.data.preparation import prepare
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.errors import CheckpointError, ConfigError, DataError, InputError


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("generate") / "run")


@pytest.fixture
def copied(run_dir, tmp_path):
    return shutil.copytree(run_dir, tmp_path / "run")


# ---------------------------------------------------------------- temperature, seed, tokens, prompt


@pytest.mark.parametrize("temperature", [1e-45, 5e-324, 1e-300, -0.0, 1e-6])
def test_tiny_temperatures_are_the_limit(run_dir, temperature):
    assert text(run_dir, temperature) == text(run_dir, 0)


def test_huge_temperatures_are_uniform(run_dir):
    assert text(run_dir, 1e308, tokens=5).startswith("def ")


BAD = {
    "temperature": ["nan", "inf", "-1", "hot"],
    "seed": [2**64, -1, 10**30],
    "tokens": [10**7, 10**30, 0],
    "prompt": [b"\xff\xfe", ""],
}


BAD = [
    (option, os.fsdecode(value) if isinstance(value, bytes) else value)
    for option, values in BAD.items()
    for value in values
]


@pytest.fixture(scope="module")
def bad(run_dir):
    """How each bad option ended."""
    given = [{"prompt": "x", "tokens": 1, option: value} for option, value in BAD]
    commands = [
        [
            "generate",
            str(run_dir),
            *(word for name, what in each.items() for word in (f"--{name}", str(what))),
        ]
        for each in given
    ]
    return dict(zip(BAD, run_commands(0, *commands), strict=True))


@pytest.mark.parametrize("which", BAD, ids=lambda which: ascii("-".join(map(str, which))))
def test_bad_options_are_one_message(bad, which):
    done = bad[which]
    assert done.returncode == 2 and "Traceback" not in done.output, done
    errors = [line for line in done.output.splitlines() if "Error: " in line]
    assert len(errors) == 1, done
    assert f"--{which[0]}" in errors[0], done
    assert done.output.endswith(errors[0] + "\n"), done


def test_largest_seed_is_taken(run_dir):
    done = command(run_dir, "--prompt", "x", "--seed", 2**64 - 1, "--tokens", 3, "--temperature", "1e-45")
    assert done.returncode == 0 and done.stdout.startswith("x") and not done.stderr, done


def test_terminals_without_the_characters_get_others(run_dir):
    done = command(
        run_dir, "--prompt", "€", "--tokens", 3, env={"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    )
    assert done.returncode == 0 and done.stdout.startswith("?") and not done.stderr, done


def test_what_is_no_run_directory_is_recognised(tmp_path):
    """Of a folder that may be a stranger's no link is followed."""
    (tmp_path / "secret.json").write_text('{"model_type": "secret"}')
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b")
    for name in ("hf", "linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "hf/config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "linked/config.json").symlink_to(tmp_path / "secret.json")
    said = {
        "hf": "it is the folder of a Hugging Face model (llama)",
        "a.gz": "it is a gzip file",
        "linked": "no config.toml",
    }
    for name, words in said.items():
        with pytest.raises(CheckpointError) as caught:
            text(tmp_path / name)
        assert f"{words}; give the run directory" in str(caught.value) and "secret" not in str(
            caught.value
        ).replace(str(tmp_path), "")


def test_what_a_terminal_would_obey_is_not_shown():
    from mpitrain.commands.generate import visible

    assert visible("a\x1b[2Jb\n\tc\x07é\x9b") == "a\ufffd[2Jb\n\tc\ufffdé\ufffd"
    assert visible("\u202ea\u2066b\u2069") == "\ufffda\ufffdb\ufffd"  # turns of direction


@pytest.mark.parametrize(
    "c",
    ["\u3000", "\u200d", "\u200c", "\xa0", "\u202f", "\xad", "\u200e", "\ufeff", "\ue000", "🏴\U000e0067"],
)
def test_ordinary_characters_that_are_no_letters_are_shown_as_they_are(c):
    """Ideographic and no-break spaces, joiners, soft hyphens.

    In text, and in names that a line at the end of a run holds.
    """
    from mpitrain.commands.generate import visible
    from mpitrain.inputs import printable

    assert visible(f"a{c}b") == printable(f"a{c}b") == f"a{c}b"
    assert printable("a\u2028b\ud800\x1b\u202e") == "a\\u2028b\\ud800\\x1b\\u202e"


# ---------------------------------------------------------------- tokens and weights


def test_tokens_that_the_tokenizer_lacks_are_never_chosen(tmp_path):
    """The model has more rows than the tokenizer has tokens, and all of them are likelier."""

    def favour(arrays):
        arrays["parameters/head.weight"][256:] = 100 * arrays["parameters/head.weight"][:44]

    run = make_run(tmp_path / "run", "model.vocab=300", change=favour)
    for temperature in (0, 1, 100):
        assert len(text(run, temperature, tokens=50)) > 4


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["embedding.weight", "head.norm.weight", "blocks.1.ffn.down.weight"])
def test_weights_are_finite(tmp_path, name, number):
    run = make_run(
        tmp_path / "run",
        change=lambda arrays: arrays[f"parameters/{name}"].reshape(-1).__setitem__(-1, number),
    )
    with pytest.raises(
        CheckpointError, match=f"step-00000010: parameters/{name} holds NaN or infinite numbers"
    ):
        text(run)


def test_weights_that_overflow_are_one_message(tmp_path):
    run = make_run(tmp_path / "run", change=lambda arrays: arrays["parameters/head.weight"].fill(3e38))
    for temperature in (0, 1):
        with pytest.raises(CheckpointError, match="the weights give NaN or infinite logits"):
            text(run, temperature)
    run = make_run(
        tmp_path / "half",
        "precision.compute=fp16",
        change=lambda arrays: arrays["parameters/head.weight"].fill(1e5),
    )
    with pytest.raises(CheckpointError, match=r"parameters/head\.weight holds NaN or infinite"):
        text(run)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
def test_every_precision_is_read(tmp_path, precision):
    assert text(make_run(tmp_path / "run", f"precision.compute={precision}"), tokens=3).startswith("def ")


def drop(arrays):
    del arrays["parameters/head.weight"]


def widen(arrays):
    arrays["parameters/head.weight"] = np.zeros((256, 17), "f4")


def narrow(arrays):
    arrays["parameters/head.weight"] = np.zeros((256, 16), "f2")


def integers(arrays):
    arrays["parameters/head.weight"] = np.zeros((256, 16), "i4")


CHANGES = {
    drop: "has no parameters/head.weight",
    widen: "parameters/head.weight is fp32 [256, 17], needed fp32 [256, 16]",
    narrow: "parameters/head.weight is fp16 [256, 16], needed fp32 [256, 16]",
    integers: "parameters/head.weight is int32 [256, 16], needed fp32 [256, 16]",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_of_another_model_is_passed_over(tmp_path, capsys, change):
    run = make_run(tmp_path / "run", change=change, steps=(10, 20))
    assert text(run, tokens=3).startswith("def ")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert CHANGES[change] in said[0]
    assert said[1] == "warning: using step-00000010"
    shutil.rmtree(run / "checkpoints" / "step-00000010")
    with pytest.raises(CheckpointError) as caught:
        text(run)
    assert CHANGES[change] in str(caught.value) and not capsys.readouterr().err


# ---------------------------------------------------------------- config.toml of a stranger


def edit(run, key, value):
    """Set a key of config.toml."""
    tree = tomllib.loads((run / "config.toml").read_text())
    table, name = key.split(".")
    tree.setdefault(table, {})[name] = value
    lines = [
        f"[{table}]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in keys.items())
        for table, keys in tree.items()
    ]
    (run / "config.toml").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.layers", 1_000),
        ("model.layers", 3),
        ("model.width", 2**62),
        ("model.width", 2**40),
        ("model.width", 10**9),
        ("model.width", 18),
        ("model.heads", 2**62),
        ("model.heads", 3),
        ("model.kv_heads", 7),
        ("model.ffn", 2**62),
        ("model.vocab", 2**62),
        ("model.vocab", 255),
        ("model.vocab", 1),
        ("model.preset", "llama3-8b"),
        ("model.preset", "none\x1b[2J"),
        ("precision.compute", "fp64"),
        ("precision.compute", "fp1"),
        ("precision.\x1b[2J", 1),
        ("model.tied", True),
    ],
)
def test_models_that_the_checkpoint_does_not_hold_are_refused(copied, key, value):
    edit(copied, key, value)
    if key == "model.preset" and "\x1b" not in value:
        for name in ("layers", "width", "heads", "kv_heads", "ffn", "vocab"):
            edit(copied, f"model.{name}", 0)
    # a head more than is needed does no harm, and weights are read into another precision
    if (key, value) in {("model.tied", True), ("precision.compute", "fp64")}:
        assert text(copied, tokens=3).startswith("def ")
        return
    with pytest.raises(InputError) as caught:
        text(copied)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.sequence", 2**31 - 1),
        ("batch.global", 2**62),
        ("batch.micro", 2**62),
        ("parallel.dp", 2**62),
        ("pipeline.schedule", "/etc/passwd"),
        ("run.dir", "/root"),
        ("data.path", "/etc/passwd"),
        ("memory.every", 7),
        ("run.seed", 2**62),
        ("optimizer.name", "muon"),
        ("run.device", "cuda"),
    ],
)
def test_what_sampling_does_not_need_does_no_harm(copied, run_dir, key, value):
    edit(copied, key, value)
    assert text(copied, tokens=5) == text(run_dir, tokens=5)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 60_000,
        b"a" * 70_000,
        b"x = " + b"9" * 5000,
        b"run = 3",
        b'"\\u001b[2J" = 1',
        b"[run]\ndir = 3",
    ],
    ids=["empty", "binary", "deep", "long", "number", "flat", "escape", "type"],
)
def test_configs_of_any_bytes_are_one_message(copied, content):
    (copied / "config.toml").write_bytes(content)
    with pytest.raises(InputError) as caught:
        text(copied)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "what", ["config.toml", "checkpoints", "data", "metrics.jsonl", "trace.json", "run.lock"]
)
@pytest.mark.parametrize("kind", ["a symbolic link", "a dangling link", "a FIFO"])
def test_nothing_in_a_run_directory_leads_elsewhere(copied, tmp_path, what, kind):
    path = copied / what
    if path.exists():
        path.rename(tmp_path / "away")
    else:
        (tmp_path / "away").touch()
    if kind == "a FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / ("away" if kind == "a symbolic link" else "nothing"))
    with pytest.raises(
        CheckpointError,
        match=f"{path} is a (symbolic link|FIFO), needed a f.*set run.dir to the place itself",
    ):
        text(copied)


def test_run_directory_through_a_link(run_dir, tmp_path):
    (tmp_path / "link").symlink_to(run_dir)
    assert text(tmp_path / "link", tokens=3) == text(run_dir, tokens=3)


@pytest.mark.parametrize("path", ["absent", "absent/below", "file", "file/below", "x" * 5000])
def test_absent_run_directories_are_one_message(tmp_path, path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="give the run directory"):
        text(tmp_path / path)


# ---------------------------------------------------------------- the tokenizer


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A tokenizer of three words, with a gap among the ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 3, "</s>": 5}, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path_factory.mktemp("tokenizer") / "t.json"))
    return tmp_path_factory.getbasetemp() / "tokenizer0" / "t.json"


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../secret.json", "link.json", "run/../../secret.json", "/dev/zero", "x" * 300]
)
def test_a_tokenizer_elsewhere_is_not_read(copied, words, monkeypatch, name):
    shutil.copy(words, copied.parent.parent / "secret.json")
    monkeypatch.chdir(copied)
    (copied / "link.json").symlink_to(words)
    edit(copied, "data.tokenizer", name)
    opened = []
    sys.addaudithook(lambda event, arguments: opened.append(arguments[0]) if event == "open" else None)
    with pytest.raises(DataError, match=r"names the tokenizer .*; give --tokenizer FILE"):
        text(copied)
    assert not any(str(path).endswith(("passwd", "secret.json", "t.json", "zero")) for path in opened)


def test_weights_without_a_tokenizer_ask_for_one(copied):
    edit(copied, "data.tokenizer", "")
    with pytest.raises(DataError, match=r"imported without a tokenizer; give .*--tokenizer FILE"):
        text(copied)


def test_a_tokenizer_within_or_given_is_read(copied, words, monkeypatch):
    within = text(copied, tokens=3, prompt="one", tokenizer=str(words))
    assert within.startswith("one") and not set(within.split()) - {"one", "two", "</s>"}
    monkeypatch.chdir(copied)
    shutil.copy(words, copied / "t.json")
    for name in ("t.json", str(copied / "t.json")):
        edit(copied, "data.tokenizer", name)
        assert text(copied, tokens=3, prompt="one") == within
    done = command(copied, "--prompt", "one", "--tokens", 3, "--tokenizer", words)
    assert done.returncode == 0 and done.stdout.startswith("one"), done


def test_another_tokenizer_than_the_runs_is_reported(copied, words, tmp_path, capsys):
    """The run's data say which it was; without them nothing is said."""
    text(copied, tokens=1, prompt="one", tokenizer=str(words))
    prepare(Corpus("text", write_text(tmp_path / "text.txt")), load_tokenizer("bytes"), copied / "data")
    text(copied, tokens=1)
    assert capsys.readouterr().err == ""
    text(copied, tokens=1, prompt="one", tokenizer=str(words))
    assert "tokens.json: the run had another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "FIFO", "missing", "text"])
def test_what_is_no_tokenizer_is_one_message(copied, monkeypatch, kind):
    monkeypatch.chdir(copied)
    path = copied / "t.json"
    {
        "folder": path.mkdir,
        "FIFO": lambda: os.mkfifo(path),
        "missing": lambda: None,
        "text": lambda: path.write_text("root:x"),
    }[kind]()
    edit(copied, "data.tokenizer", "t.json")
    with pytest.raises(DataError) as caught:
        text(copied)
    assert "root:x" not in str(caught.value)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(copied, tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"one": 0, "two": 10_000}, unk_token=None)).save(str(tmp_path / "large.json"))
    with pytest.raises(ConfigError, match=r"model\.vocab = 256, but the tokenizer has 10001 tokens"):
        text(copied, prompt="one", tokenizer=str(tmp_path / "large.json"))


def test_text_of_joined_documents_stops_at_the_end_of_one(run_dir):
    """Tokens are as good as uniform: one of 256 is the end, which isn't shown."""
    assert tomllib.loads((run_dir / "config.toml").read_text())["data"]["documents"] == "joined"
    found = [text(run_dir, 1e9, seed) for seed in (66, 74)]  # after a few tokens
    assert all("\0" not in shown and len(shown) < 20 for shown in found)

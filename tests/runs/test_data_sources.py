"""A source of data is one file: of text or of tokens, in data/sources/ or a module of the user's own."""

import json
import os
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
import token_ids
from conftest import LONG
from folders import ROOT, SUPPORT
from launch import (
    MPITRAIN,
    finished,
    loss_lines,
    mpirun,
    options,
    run_tiny,
    tail,
    tiny,
    two_texts,
    words_file,
    write_text,
)

from mpitrain.data import encoding
from mpitrain.data import preparation as preparation_module
from mpitrain.data.corpus import Corpus, documents
from mpitrain.data.preparation import Reporter, prepare
from mpitrain.data.source import SOURCES, Document, Position, Source
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.data.tokens import describe, open_ends, open_tokens
from mpitrain.errors import ConfigError, DataError, StoppedEarly

PLUGIN = "token_ids:TOKEN_IDS"
BYTES = load_tokenizer("bytes")
ON_PATH = {"PYTHONPATH": str(SUPPORT)}


@pytest.fixture
def ids(tmp_path):
    """A folder with the ids of five texts of bytes, in two files."""
    texts = (b"one\0two", b"three\0\0five")
    for name, text in zip("ab", texts, strict=True):
        (tmp_path / "ids").mkdir(exist_ok=True)
        (tmp_path / "ids" / f"{name}.ids").write_bytes(np.frombuffer(text, np.uint8).astype("<u2"))
    return tmp_path / "ids"


# ---------------------------------------------------------------- one file


def test_those_there_are():
    assert sorted(SOURCES.built_in()) == [
        *(
            "auto",
            "chat",
            "datatrove",
            "jsonl",
            "megatron",
            "nanogpt",
            "npy",
            "parquet",
            "python-stdlib",
            "text",
        )
    ]


@LONG
def test_a_file_in_the_folder_is_one_more_source(tmp_path):
    """A copy of the tree with one file more, and nothing else changed."""
    for top in ("mpitrain", "comm", "schedules"):
        shutil.copytree(
            ROOT / top, tmp_path / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    shutil.copy(SUPPORT / "token_ids.py", tmp_path / "mpitrain/data/sources")
    (tmp_path / "jobs").symlink_to(ROOT / "jobs")
    (tmp_path / "a.ids").write_bytes(np.arange(1, 256).astype("<u2"))
    words = options({"data.source": "token-ids", "data.path": tmp_path / "a.ids", "data.sequence": 16})
    words += options({"run.dir": tmp_path / "run", "run.steps": 2, "model.layers": 1, "model.width": 8})
    words += options({"model.heads": 1, "model.kv_heads": 1, "model.ffn": 8, "batch.global": 2})
    done = finished(
        [sys.executable, "-m", "mpitrain", "run", *words],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sequences of token-ids" in done.stdout, done.stdout + done.stderr
    assert open_tokens(tmp_path / "run/data").tolist() == list(range(1, 256))


def test_an_unknown_one_is_refused_with_those_there_are():
    with pytest.raises(
        ConfigError, match=r"data\.source = 'web'; known: auto, chat, datatrove, jsonl, megatron"
    ):
        SOURCES.find("web")
    with pytest.raises(ConfigError, match=r"data\.source = 'txts'; did you mean text\?"):
        SOURCES.find("txts")


# ---------------------------------------------------------------- tokens in place of a text


def test_ids_become_the_tokens_with_what_goes_between_documents(ids, tmp_path):
    prepare(Corpus(PLUGIN, ids), BYTES, tmp_path / "data")
    assert open_tokens(tmp_path / "data").tobytes() == b"one\0two\0three\0five"
    assert open_ends(tmp_path / "data").tolist() == [4, 8, 14, 18]
    found = describe(tmp_path / "data")
    assert found.tally.describe(found.count).startswith("2 files, 4 documents, 30 bytes, 18 tokens")


def test_ids_have_the_token_before_each_document_that_the_tokenizer_puts_there(ids, tmp_path):
    words = words_file(tmp_path / "t.json", {f"w{number}": number for number in range(128)})
    tokenizer = load_tokenizer(words, "w0", "w1")
    prepare(Corpus(PLUGIN, ids), tokenizer, tmp_path / "data")
    assert open_tokens(tmp_path / "data").tobytes() == b"\1one\0\1two\0\1three\0\1five"


def test_preparation_continues_within_a_file_of_ids(ids, tmp_path):
    prepare(Corpus(PLUGIN, ids), BYTES, tmp_path / "whole")
    stops = 0
    for most in (1, 2, 4):
        seen = []

        def each(what, most=most, seen=seen):
            seen.append(what)
            if sum(what.startswith("preparing") for what in seen) > most:
                raise StoppedEarly("tokens", "a test")

        try:
            prepare(Corpus(PLUGIN, ids), BYTES, tmp_path / "data", report=Reporter(each))
        except StoppedEarly:
            stops += 1
    assert stops == 2 and describe(tmp_path / "data") == describe(tmp_path / "whole")
    assert open_tokens(tmp_path / "data").tobytes() == open_tokens(tmp_path / "whole").tobytes()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            np.array([1, 256]),
            r"a\.ids:1 has token 256, the tokenizer has 256; give the one .*data\.tokenizer",
        ),
        (np.array([-1, 1]), "has token -1"),
        (np.array([1.0]), "has ids of type float64 and 1 dimensions, needed integers in a row"),
        (np.array([[1]]), "and 2 dimensions"),
    ],
)
def test_ids_that_cannot_be_the_tokenizers_are_refused(ids, tmp_path, monkeypatch, given, message):
    source = replace(
        token_ids.TOKEN_IDS,
        read=lambda file, begin, key: iter([Document(f"{file.name}:1", b"", Position(1), ids=given)]),
    )
    monkeypatch.setattr(token_ids, "TOKEN_IDS", source)
    with pytest.raises(DataError, match=message):
        prepare(Corpus(PLUGIN, ids), BYTES, tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []


def test_documents_of_ids_are_not_all_in_memory_at_once():
    """They are read ahead of what is written by a share, as texts are."""
    read = []

    def large():
        for number in range(6):
            read.append(number)
            yield Document(str(number), b"", Position(1), ids=np.ones(encoding.SHARE_BYTES // 8, np.int64))

    for number, (document, ids) in enumerate(encoding.encoded(large(), BYTES, encoding.LocalEncoder(BYTES))):
        assert document.name == str(number) and ids.dtype == np.uint8 and len(read) <= number + 2
    assert len(read) == 6


def test_a_corpus_of_documents_without_anything_is_refused(tmp_path):
    (tmp_path / "a.ids").write_bytes(b"\0\0")
    with pytest.raises(DataError, match="holds no text"):
        list(documents(Corpus(PLUGIN, tmp_path / "a.ids")))


def test_another_version_of_a_source_makes_tokens_again(tmp_path, monkeypatch):
    read = []
    all_documents = preparation_module.part_documents
    monkeypatch.setattr(
        preparation_module, "part_documents", lambda *given: read.append(1) or all_documents(*given)
    )
    corpus = Corpus("token_ids:SOURCE", two_texts(tmp_path / "corpus"))
    text = SOURCES.find("text")
    for version, times in ((1, 1), (1, 1), (2, 2), (2, 2)):
        source = Source("own", text.read, version=version)
        monkeypatch.setattr(token_ids, "SOURCE", source, raising=False)
        prepare(corpus, BYTES, tmp_path / "data")
        assert len(read) == times
    assert describe(tmp_path / "data").origin.source == "token_ids:SOURCE, version 2"


# ---------------------------------------------------------------- runs


def test_a_run_on_ids_has_the_bits_of_a_run_on_their_text(tmp_path):
    """The bytes of a text as ids, read by one rank of two; and the run resumes."""
    text = write_text(tmp_path / "a.txt", 20_000)
    np.frombuffer(text.read_bytes(), np.uint8).astype("<u2").tofile(tmp_path / "a.ids")
    done = run_tiny(2, tmp_path / "text", text, run_steps=4)
    assert done.returncode == 0, tail(done.output)
    for steps in (2, 4):
        keys = dict(data_source=PLUGIN, run_steps=steps, schedule_steps=4)
        done = run_tiny(2, tmp_path / "ids", tmp_path / "a.ids", env=ON_PATH, **keys)
        assert done.returncode == 0, tail(done.output)
    lines = [loss_lines(tmp_path / name) for name in ("ids", "text")]
    # after step 2, where the first part of the run ends, it has a validation loss, too
    assert [each[:2] + each[3:] for each in lines[:1]] == [each[:2] + each[3:] for each in lines[1:]]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("no_such_module:SOURCE", 'data.source = "no_such_module:SOURCE": found no module no_such_module'),
        ("token_ids:NOTHING", "found nothing of this name, needed a Source"),
    ],
)
def test_a_plug_in_that_there_is_not_is_refused_before_anything_is_written(tmp_path, named, message):
    text = write_text(tmp_path / "a.txt")
    done = run_tiny(2, tmp_path / "run", text, env=ON_PATH, data_source=named)
    assert done.returncode == 2 and message in done.output, tail(done.output)
    assert done.output.count(message) == 1 and not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A run directory whose data came of a plug-in, and its text."""
    folder = tmp_path_factory.mktemp("theirs")
    np.full(4000, 7, "<u2").tofile(folder / "a.ids")
    done = run_tiny(1, folder / "run", folder / "a.ids", env=ON_PATH, data_source=PLUGIN, run_steps=2)
    assert done.returncode == 0, tail(done.output)
    return folder


COMMANDS = [
    ("run", "{run}/config.toml"),
    pytest.param(("run", "{run}/config.toml", "--dry-run"), marks=LONG, id="dry run"),
    pytest.param(("verify", "{run}/config.toml", "--layout", "pp=2"), marks=LONG, id="verify "),
    pytest.param(("generate", "{run}", "--prompt", "a", "--tokens", "2"), marks=LONG, id="generate "),
    ("memory", "{run}/config.toml", "--ranks", "2"),
    pytest.param(("program", "{run}/config.toml", "--ranks", "2"), marks=LONG, id="program "),
    pytest.param(("check", "{run}/config.toml", "--ranks", "2"), marks=LONG, id="check "),
    ("ckpt", "inspect", "{run}"),
    pytest.param(("ckpt", "verify", "{run}"), marks=LONG, id="ckpt verify"),
    pytest.param(("ckpt", "diff", "{run}", "{run}"), marks=LONG, id="diff "),
    pytest.param(("ckpt", "prune", "{run}"), marks=LONG, id="ckpt prune"),
    ("job", "again", "{run}", "--after", "1"),
]


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command[:2]).split("{")[0])
def test_no_command_loads_a_plug_in_that_stands_in_a_run_directory_only(theirs, tmp_path, command):
    """Its module is on Python's path, and notes that it was imported."""
    noted = tmp_path / "imported"
    words = [word.format(run=theirs / "run") for word in command]
    done = mpirun(1, MPITRAIN, *words, env={**ON_PATH, "NOTE_IMPORT": str(noted)}, forked=False)
    assert not noted.exists(), tail(done.output)
    if command[0] == "run":
        assert done.returncode == 2, tail(done.output)
        assert "in a run directory: it names code" in done.output, tail(done.output)


def test_tokens_that_name_a_plug_in_load_none(theirs, tmp_path):
    """Of a stranger's run directory, whose config.toml names a source that is built in."""
    run = tmp_path / "run"
    shutil.copytree(theirs / "run", run)
    text = write_text(tmp_path / "a.txt")
    noted = tmp_path / "imported"
    config = run / "config.toml"
    config.write_text(config.read_text().replace(PLUGIN, "text"))
    assert json.loads((run / "data/tokens.json").read_text())["origin"]["source"] == PLUGIN
    environment = {**ON_PATH, "NOTE_IMPORT": str(noted)}
    done = mpirun(1, MPITRAIN, "run", *tiny(run, text, run_steps=3), env=environment, forked=False)
    assert done.returncode == 2 and "trained on other data" in done.output, tail(done.output)
    assert not noted.exists()


@pytest.mark.parametrize("way", ["--set", pytest.param("variable", marks=LONG)])
def test_a_run_resumes_with_a_plug_in_that_the_user_names_in_this_command(theirs, tmp_path, way):
    run = tmp_path / "run"
    shutil.copytree(theirs / "run", run)
    words = options({"run.dir": run, "run.steps": 3} | ({"data.source": PLUGIN} if way == "--set" else {}))
    environment = ON_PATH | ({"MPITRAIN_PLUGINS": PLUGIN} if way == "variable" else {})
    done = mpirun(1, MPITRAIN, "run", str(run / "config.toml"), *words, env=environment)
    assert done.returncode == 0 and "resuming after step 2" in done.output, tail(done.output)

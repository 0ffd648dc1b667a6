"""`mpitrain data prepare`: killed at any moment and started on other ranks, it writes the same bytes.

MPITRAIN_EFFORT=50 kills as often; by default there are three.
"""

import json
import random
import time

import pytest
from effort import numbers
from launch import MPITRAIN, loss_lines, mpirun, options, run_tiny, started, tail
from test_run_tokenizing import write_corpus

KILLS = numbers(range(3), 50)
FILES = ("tokens.bin", "ends.bin", "tokens.json")


def words(corpus, store):
    settings = {"data.source": "jsonl", "data.path": corpus / "texts.jsonl"}
    settings |= {"data.tokenizer": corpus / "t.json", "data.tokens": store}
    return ("data", "prepare", *options(settings))


def stored(store):
    (folder,) = store.iterdir()
    others = {path.name.partition("-")[0] for path in folder.iterdir()} - set(FILES)
    assert others <= {"verified.json", "copies.bin", "from"}
    return [(folder / name).read_bytes() for name in FILES]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), 150)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    store = tmp_path_factory.mktemp("store") / "whole"
    done = mpirun(1, MPITRAIN, *words(corpus, store))
    assert done.returncode == 0, tail(done.output)
    return store


def test_killed_at_random_moments_it_writes_the_same_bytes(tmp_path, corpus, whole):
    dice = random.Random(KILLS.start)
    store = tmp_path / "store"
    for _ in KILLS:
        with started(dice.choice((1, 2)), MPITRAIN, *words(corpus, store)) as job:
            while job.process.poll() is None and "tokenizing: " not in job.text():
                time.sleep(0.01)
            time.sleep(dice.expovariate(1))
            job.kill()
    done = mpirun(2, MPITRAIN, *words(corpus, store))
    assert done.returncode == 0, tail(done.output)
    assert stored(store) == stored(whole)


def test_a_run_takes_what_is_prepared_and_prepares_what_is_missing(tmp_path, corpus, whole):
    given = {"data_source": "jsonl", "data_tokenizer": corpus / "t.json", "run_steps": 1}
    text = corpus / "texts.jsonl"
    done = run_tiny(1, tmp_path / "one", text, data_tokens=whole, **given)
    assert done.returncode == 0 and "tokenizing: " not in done.output, tail(done.output)
    done = run_tiny(1, tmp_path / "two", text, data_tokens=tmp_path / "other", **given)
    assert done.returncode == 0, tail(done.output)
    assert stored(tmp_path / "other") == stored(whole)
    assert loss_lines(tmp_path / "one") == loss_lines(tmp_path / "two")
    said = json.loads(stored(whole)[2])["origin"]
    assert said["path"] == said["files"] == ""  # content and tokenizer alone


def test_a_vocabulary_larger_than_the_models_is_refused(tmp_path, corpus):
    done = mpirun(1, MPITRAIN, *words(corpus, tmp_path / "store"), "--set=model.vocab=90")
    assert done.returncode == 2, tail(done.output)
    assert "model.vocab = 90, but the tokenizer has " in done.output, tail(done.output)
    assert not (tmp_path / "store").exists()


def test_without_a_store_the_run_directory_has_them(tmp_path, corpus):
    text, run_dir = corpus / "texts.jsonl", tmp_path / "run"
    settings = {"data.source": "jsonl", "data.path": text, "run.dir": run_dir}
    done = mpirun(1, MPITRAIN, "data", "prepare", *options(settings))
    assert done.returncode == 0, tail(done.output)
    assert [path.name for path in run_dir.iterdir()] == ["data"]
    done = run_tiny(1, run_dir, text, data_source="jsonl", run_steps=1)
    assert done.returncode == 0 and "tokenizing: " not in done.output, tail(done.output)

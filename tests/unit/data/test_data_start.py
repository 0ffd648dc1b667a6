"""A start on prepared tokens reads none of them again, unless a file looks otherwise than when verified."""

import json
import os
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from launch import two_texts

from mpitrain.config import load
from mpitrain.data import corpus_files, packed_rows, shared_tokens, tokens, verified
from mpitrain.data.corpus import Corpus, corpus_of
from mpitrain.data.preparation import prepare
from mpitrain.data.tokenizer import load_tokenizer, vocabulary_of
from mpitrain.errors import DataError
from mpitrain.training import corpora
from mpitrain.training.corpora import PreparedCorpus

BYTES = load_tokenizer("bytes")


@pytest.fixture
def prepared(tmp_path):
    """Return a function that prepares a corpus, and says whether tokens were read for it."""
    corpus = Corpus("text", two_texts(tmp_path / "corpus"))
    read = []
    has = tokens._has

    def start(folder=tmp_path / "data", shared=""):
        read.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokens, "_has", lambda *given: read.append(given) or has(*given))
            prepare(corpus, BYTES, folder, shared=shared)
        return bool(read)

    start()
    return start


def change(folder):
    """Change a byte at once, and keep the size."""
    with open(folder / "tokens.bin", "r+b") as file:
        file.write(b"x")


def test_a_second_start_reads_no_token(prepared, tmp_path):
    assert not prepared()
    change(tmp_path / "data")
    assert prepared()  # found, and made anew
    assert (tmp_path / "data/tokens.bin").read_bytes().startswith(b"one")
    assert not prepared()


def test_a_change_within_a_tick_of_the_clock_is_seen(prepared, tmp_path):
    for _ in range(20):
        prepared()
        change(tmp_path / "data")
        assert prepared()


@pytest.mark.parametrize("way", ["copied", "another user's", "damaged", "other facts", "a link"])
def test_what_was_not_verified_here_is_read(prepared, tmp_path, monkeypatch, way):
    data = tmp_path / "data"
    note = data / "verified.json"
    if way == "copied":
        shutil.copytree(data, tmp_path / "other")
        shutil.rmtree(data)
        (tmp_path / "other").rename(data)
    elif way == "another user's":
        monkeypatch.setattr(verified.os, "geteuid", lambda: os.getuid() + 1)
    elif way == "damaged":
        note.write_text("{")
    elif way == "other facts":
        note.write_text(json.dumps(json.loads(note.read_text()) | {"facts": "others"}))
    else:
        note.rename(tmp_path / "note")
        note.symlink_to(tmp_path / "note")
    assert prepared()


def test_what_the_store_has_is_neither_read_nor_compared_again(prepared, tmp_path, monkeypatch):
    prepared(tmp_path / "a", tmp_path / "store")

    def fail(*_):
        raise AssertionError("the corpus was read again")

    with monkeypatch.context() as patch:
        patch.setattr(shared_tokens, "content_of", fail)
        assert not prepared(tmp_path / "b", tmp_path / "store")
    (tmp_path / "corpus/1.txt").write_text("two")  # the name and size of before
    prepared(tmp_path / "c", tmp_path / "store")
    assert (tmp_path / "c/tokens.bin").read_bytes().startswith(b"two")


def test_an_index_that_declares_more_than_it_has_is_refused_before_files_are_compared(tmp_path, monkeypatch):
    """Its 1.4 TB, all of them holes, would be read for hours. One file or two: each is looked at."""

    def fail(*_):
        raise AssertionError("the files were read whole")

    monkeypatch.setattr(shared_tokens, "content_of", fail)
    (tmp_path / "corpus").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"corpus/{name}.bin").write_bytes(b"12" if name == "b" else b"1234")
        with open(tmp_path / f"corpus/{name}.idx", "wb") as file:
            file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1 << 36, 1 << 36))
            file.truncate(34 + 20 * (1 << 36))
        with pytest.raises(DataError, match=f"{name}.idx declares"):
            prepare(
                Corpus("megatron", tmp_path / "corpus"), BYTES, tmp_path / "data", shared=tmp_path / "store"
            )


def test_files_of_equal_size_are_read_whole_only_if_they_begin_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_files, "SAMPLE_BYTES", 4)
    for name, text in {"a": "1234567", "b": "1234568", "c": "9234567", "d": "1234567"}.items():
        (tmp_path / name).write_text(text)
    digested = []
    digest = corpus_files._digest
    monkeypatch.setattr(
        corpus_files, "_digest", lambda *given: digested.append((given[0].name, len(given))) or digest(*given)
    )
    source = corpus_files.SOURCES.find("text")
    listing = corpus_files.list_unique(source, tmp_path)
    assert [file.name for file in listing.files] == ["a", "b", "c"]
    assert [name for name, arguments in digested if arguments == 2] == ["a", "b", "d"]


# ---------------------------------------------------------------- copies of held-out documents


def prepared_corpus(folder, **changes):
    keys = {"data.sequence": 4, "data.val_fraction": 0.2, "run.seed": 1, **changes}
    config = load(None, tuple(f"{key}={value}" for key, value in keys.items()))
    return PreparedCorpus(config, folder, vocabulary_of(BYTES), "feistel")


def test_blocks_of_packed_documents_are_planned_once_for_each_split(tmp_path, monkeypatch):
    for module in (packed_rows, corpora):
        monkeypatch.setattr(module, "BLOCK", 16)
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"text": f"text {number}" * (1 + number % 3)}) + "\n" for number in range(90))
    )
    prepare(Corpus("jsonl", tmp_path / "lines.jsonl"), BYTES, tmp_path / "data")
    planned = []
    plan = packed_rows.BlockPlan.of
    monkeypatch.setattr(packed_rows.BlockPlan, "of", lambda *given: planned.append(1) or plan(*given))

    def opened(**changes):
        prepared = prepared_corpus(tmp_path / "data", **{"data.documents": "packed", **changes})
        prepared.find()
        number, train = len(planned), prepared.corpora().train
        assert len(planned) == number
        prepared.keep()
        return train

    first = opened()
    number = len(planned)
    assert number >= 6
    again = opened()
    assert len(planned) == number and again.num_sequences == first.num_sequences
    assert again.rows(range(20)).tokens.tolist() == first.rows(range(20)).tokens.tolist()
    for changes in ({"run.seed": 2}, {"data.val_fraction": 0.4}, {"data.sequence": 9}):
        number = len(planned)
        opened(**changes)
        assert len(planned) > number, changes
    kept = tmp_path / "data/packed.bin"
    kept.write_bytes(kept.read_bytes()[:-1] + b"\1")
    number = len(planned)
    opened()
    assert len(planned) > number


def test_each_block_is_announced_before_it_is_planned(tmp_path, monkeypatch):
    """Wherever that is: many blocks take minutes, and a rank that says nothing counts as hanging."""
    for module in (packed_rows, corpora):
        monkeypatch.setattr(module, "BLOCK", 16)
    (tmp_path / "lines.jsonl").write_text("".join(f'{{"text": "text {n}"}}\n' for n in range(90)))
    prepare(Corpus("jsonl", tmp_path / "lines.jsonl"), BYTES, tmp_path / "data")
    config = load(None, ("data.documents=packed", "data.sequence=4", "data.val_fraction=0.2"))
    said = []
    opened = PreparedCorpus(config, tmp_path / "data", vocabulary_of(BYTES), "feistel", said.append)
    num_blocks = len(opened.corpora().train.counts.sizes)
    assert said[:num_blocks] == [
        f"packing documents, block {number + 1} of {num_blocks}" for number in range(num_blocks)
    ]


def test_copies_are_looked_for_once_for_each_split(tmp_path, monkeypatch):
    (tmp_path / "lines.jsonl").write_text(
        "".join(json.dumps({"text": f"text {number % 7}"}) + "\n" for number in range(60))
    )
    prepare(Corpus("jsonl", tmp_path / "lines.jsonl"), BYTES, tmp_path / "data")
    looked = []
    find = corpora.copies_of
    monkeypatch.setattr(corpora, "copies_of", lambda *given: looked.append(1) or find(*given))
    first = prepared_corpus(tmp_path / "data")
    found = first.find_copies()
    first.keep()
    assert found.size and len(looked) == 1
    assert prepared_corpus(tmp_path / "data").find_copies().tolist() == found.tolist() and len(looked) == 1
    for changes in ({"run.seed": 2}, {"data.val_fraction": 0.3}, {"data.sequence": 5}):
        other = prepared_corpus(tmp_path / "data", **changes).find_copies()
        assert other.tolist() != found.tolist() or "data.sequence" in changes
    assert len(looked) == 4
    kept = tmp_path / "data/copies.bin"
    kept.write_bytes(kept.read_bytes()[:-1] + b"\1")
    assert prepared_corpus(tmp_path / "data").find_copies().tolist() == found.tolist() and len(looked) == 5


# ---------------------------------------------------------------- 10**12 tokens

MEASURED = """
import json, sys, time
from pathlib import Path
from mpitrain.config import load
from mpitrain.data.corpus import corpus_of
from mpitrain.data.preparation import prepare
from mpitrain.data.tokenizer import load_tokenizer, vocabulary_of
from mpitrain.training.corpora import PreparedCorpus

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name))

config = load(None, tuple(sys.argv[2:]))
tokenizer = load_tokenizer(config.data.tokenizer)
before, begin = resident("VmRSS"), time.process_time()
prepare(corpus_of(config.data), tokenizer, sys.argv[1])
prepared = PreparedCorpus(config, Path(sys.argv[1]), vocabulary_of(tokenizer), "feistel")
prepared.find()
train = prepared.corpora().train
rows = train.rows(range(64))
seconds, megabytes = time.process_time() - begin, (resident("VmHWM") - before) / 1024
print(json.dumps([seconds, megabytes, train.num_sequences, len(rows.tokens)]))
"""
NUM_DOCUMENTS = 1_000_000


def imitated(folder, count, settings):
    """Write what a preparation of `count` tokens leaves, of sparse files which nobody has read."""
    from mpitrain.data import preparation
    from mpitrain.data.origin import ReadCounts, write_struct
    from mpitrain.data.preparation import QUIET

    lengths = np.arange(NUM_DOCUMENTS) + (count - NUM_DOCUMENTS * (NUM_DOCUMENTS - 1) // 2) // NUM_DOCUMENTS
    lengths[-1] += count - int(lengths.sum())
    ends = np.cumsum(lengths).astype("<i8")
    corpus = folder / "corpus"
    corpus.mkdir()
    with open(corpus / "a.bin", "wb") as file:
        file.truncate(2 * count)
    with open(corpus / "a.idx", "wb") as file:
        file.truncate(34 + 20 * NUM_DOCUMENTS)
    config = load(None, (*settings, f"data.path={corpus}"))
    origin = preparation._work(corpus_of(config.data), BYTES, None, QUIET).origin
    data = folder / "data"
    data.mkdir()
    ends.tofile(data / "ends.bin")
    with open(data / "tokens.bin", "wb") as file:
        file.truncate(count)
    tally = ReadCounts(documents=NUM_DOCUMENTS, size=count, files=1)
    described = tokens.Description(origin, count, "|u1", "0" * 32, "1" * 32, tally, copies_apart=True)
    write_struct(data / "tokens.json", described)
    tokens.note_intact(data, described)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "copies_of", lambda *given: np.arange(3))
        prepared = PreparedCorpus(config, data, vocabulary_of(BYTES), "feistel")
        prepared.find()
        prepared.keep()
    return data


@pytest.mark.parametrize("documents", ["joined", "packed"])
def test_a_start_on_a_trillion_tokens_takes_2_s_and_50_mb(tmp_path, documents):
    """Seconds are of the process: other programs may be at work, too."""
    count = 10**12
    settings = ("data.source=megatron", "data.sequence=2048", f"data.documents={documents}")
    data = imitated(tmp_path, count, settings)
    words = (sys.executable, "-c", MEASURED, str(data), *settings, f"data.path={tmp_path}/corpus")
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    seconds, megabytes, sequences, rows = json.loads(done.stdout)
    print(f"{seconds:.2f} s, {megabytes:.0f} MB")
    assert 0.94 * count < sequences * 2048 < 0.96 * count and rows == 64
    assert seconds < 2 and megabytes < 50, (seconds, megabytes)

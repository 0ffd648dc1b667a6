"""data.tokens: runs share tokens by the content of text and tokenizer, whole ones only, and write
over none.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest
from launch import two_texts, words_file

from mpitrain.data import preparation as preparation_module
from mpitrain.data import shared_tokens as shared_module
from mpitrain.data.corpus import Corpus
from mpitrain.data.preparation import QUIET, prepare
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.data.tokens import describe, open_ends, open_tokens

BYTES = load_tokenizer("bytes")


@pytest.fixture
def corpus(tmp_path):
    return two_texts(tmp_path / "corpus")


@pytest.fixture
def count_reads(monkeypatch):
    """Return the corpora that were read for tokens."""
    read = []
    documents = preparation_module.part_documents
    monkeypatch.setattr(
        preparation_module,
        "part_documents",
        lambda *given, **named: read.append(given[0].path) or documents(*given, **named),
    )
    return read


def run(corpus, folder, place, tokenizer=BYTES, source="text", report=QUIET, **keys):
    """Prepare the tokens of a run that shares them; return the lines that it says."""
    said = []
    report = report._replace(line=said.append)
    prepare(Corpus(source, corpus, **keys), tokenizer, folder, report=report, shared=place)
    return said


def published(place):
    (folder,) = place.iterdir()
    return folder


def contents(folder):
    return [(folder / name).read_bytes() for name in ("tokens.bin", "ends.bin")]


def test_another_run_takes_them_without_reading_the_text_again(corpus, tmp_path, count_reads):
    run(corpus, tmp_path / "a", tmp_path / "shared")
    said = run(corpus, tmp_path / "b", tmp_path / "shared")
    assert count_reads == [corpus] and contents(tmp_path / "a") == contents(tmp_path / "b")
    assert said == [
        f"data.tokens: {published(tmp_path / 'shared')} has the tokens of this text and tokenizer"
    ]
    assert sorted(os.listdir(tmp_path / "b")) == ["ends.bin", "tokens.bin", "tokens.json", "verified.json"]
    assert run(corpus, tmp_path / "b", tmp_path / "shared") == []  # whose own they are by now
    left = sorted(name.partition("-")[0] for name in os.listdir(published(tmp_path / "shared")))
    assert left == ["ends.bin", "from", "tokens.bin", "tokens.json", "verified.json"]


def test_the_content_says_whether_it_is_the_same_text(corpus, tmp_path, count_reads):
    run(corpus, tmp_path / "a", tmp_path / "shared")
    moved = tmp_path / "elsewhere"
    shutil.copytree(corpus, moved)
    (moved / "1.txt").rename(moved / "0.txt")
    run(moved, tmp_path / "b", tmp_path / "shared")
    assert count_reads == [corpus]
    before = (corpus / "1.txt").stat()
    (corpus / "1.txt").write_text("two")  # the same name, size and time
    os.utime(corpus / "1.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    run(corpus, tmp_path / "c", tmp_path / "shared")
    assert open_tokens(tmp_path / "c").tobytes() == "two\0zwölf".encode()
    assert len(list((tmp_path / "shared").iterdir())) == 2


def test_another_tokenizer_or_setting_has_tokens_of_its_own(tmp_path, count_reads):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a", "other": "b"}))
    words = [load_tokenizer(words_file(tmp_path / f"{n}.json", {"a": n, "b": 1 - n})) for n in (0, 1)]
    ways = [
        {},
        {"text_key": "other"},
        {"tokenizer": words[0]},
        {"tokenizer": words[1]},
        {"tokenizer": load_tokenizer("bytes", "")},
    ]
    for number, way in enumerate(ways):
        run(tmp_path / "a.jsonl", tmp_path / f"run-{number}", tmp_path / "shared", source="jsonl", **way)
    assert len(count_reads) == len(ways) == len(list((tmp_path / "shared").iterdir()))


@pytest.mark.parametrize(
    "damage", ["tokens", "short", "ends", "no tokens", "no description", "description", "link", "another's"]
)
def test_damaged_or_partial_ones_are_made_again(corpus, tmp_path, count_reads, damage):
    run(corpus, tmp_path / "a", tmp_path / "shared")
    folder = published(tmp_path / "shared")
    whole = contents(tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    tokens, ends, description = (folder / name for name in ("tokens.bin", "ends.bin", "tokens.json"))
    if damage == "tokens":
        tokens.write_bytes(b"?" + tokens.read_bytes()[1:])
    elif damage == "short":
        tokens.write_bytes(tokens.read_bytes()[:-1])
    elif damage == "ends":
        ends.write_bytes(ends.read_bytes()[::-1])
    elif damage == "no tokens":
        tokens.unlink()
    elif damage == "no description":
        description.unlink()
    elif damage == "description":
        description.write_text("{")
    elif damage == "link":
        tokens.rename(tmp_path / "away")
        tokens.symlink_to(tmp_path / "away")
    elif damage == "another's":
        found = json.loads(description.read_text())
        found["origin"]["tokenizer"] = "another"
        description.write_text(json.dumps(found))
    said = run(corpus, tmp_path / "b", tmp_path / "shared")
    assert len(count_reads) == 2 and contents(tmp_path / "b") == whole == contents(folder)
    assert ("is damaged or not complete; it is prepared again" in said[0]) == (damage != "no description"), (
        said
    )
    assert not tokens.is_symlink()


def test_a_run_directory_is_whole_without_the_shared_folder(corpus, tmp_path):
    for name in "ab":
        run(corpus, tmp_path / name, tmp_path / "shared")
    shutil.rmtree(tmp_path / "shared")
    for name in "ab":
        assert open_tokens(tmp_path / name).tobytes() == "one\0zwölf".encode() and open_ends(
            tmp_path / name
        ).tolist() == [4, 10]


def test_copies_where_there_are_no_links(corpus, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(shared_module.os, "link", fail)
    for name in "ab":
        run(corpus, tmp_path / name, tmp_path / "shared")
    files = [
        folder / "tokens.bin" for folder in (tmp_path / "a", tmp_path / "b", published(tmp_path / "shared"))
    ]
    assert (
        len({file.stat().st_ino for file in files}) == 3 and len({file.read_bytes() for file in files}) == 1
    )


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_sharing(corpus, tmp_path):
    (tmp_path / "file").touch()
    said = run(corpus, tmp_path / "a", tmp_path / "file" / "shared")
    assert said[-1].endswith("cannot be written: Not a directory; this run keeps its tokens to itself")
    assert describe(tmp_path / "a").count == 10


def test_unfinished_tokens_of_a_run_never_continue_in_a_shared_file(corpus, tmp_path):
    """A draft is cut and written to; under a name of a shared file, that would be another run's."""
    run(corpus, tmp_path / "a", tmp_path / "shared")
    before = contents(published(tmp_path / "shared"))
    run(corpus, tmp_path / "b", tmp_path / "shared")
    (corpus / "3.txt").write_text("three")
    run(corpus, tmp_path / "b", tmp_path / "shared")
    run(corpus, tmp_path / "a", "")
    assert contents(published_of(tmp_path / "shared", 10)) == before


def published_of(place, count):
    (folder,) = (folder for folder in place.iterdir() if describe(folder).count == count)
    return folder


AT_ONCE = """
import sys, time
from pathlib import Path
from mpitrain.data.corpus import Corpus
from mpitrain.data.preparation import prepare
from mpitrain.data.tokenizer import load_tokenizer
corpus, folder, shared, begin = sys.argv[1:]
time.sleep(max(0, float(begin) - time.time()))
for number in range(20):
    prepare(Corpus("text", corpus), load_tokenizer("bytes"), f"{folder}-{number}", shared=shared)
"""


def test_runs_that_start_at_once_do_not_write_over_each_other(tmp_path):
    import time

    (tmp_path / "corpus").mkdir()
    for name in "abc":
        (tmp_path / "corpus" / name).write_text(name * 100_000)
    begin = str(time.time() + 1.5)
    given = [
        [sys.executable, "-c", AT_ONCE, tmp_path / "corpus", tmp_path / name, tmp_path / "shared", begin]
        for name in "xy"
    ]
    for process in [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in given]:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    prepare(Corpus("text", tmp_path / "corpus"), BYTES, tmp_path / "alone")
    whole = contents(tmp_path / "alone")
    for folder in [
        *(tmp_path / f"{name}-{number}" for name in "xy" for number in range(20)),
        published(tmp_path / "shared"),
    ]:
        assert contents(folder) == whole
    left = sorted(name.partition("-")[0] for name in os.listdir(published(tmp_path / "shared")))
    assert left == ["ends.bin", "from", "tokens.bin", "tokens.json", "verified.json"]

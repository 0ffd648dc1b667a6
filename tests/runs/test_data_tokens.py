"""Prepared tokens: complete or absent, reused while the corpus is the same, made anew when it is not."""

import json
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import xxhash
from conftest import LONG
from launch import two_texts, words_file

from mpitrain.data import draft as draft_module
from mpitrain.data import preparation as preparation_module
from mpitrain.data import read_tokens
from mpitrain.data import tokens as tokens_module
from mpitrain.data.corpus import Corpus
from mpitrain.data.preparation import Reporter, prepare
from mpitrain.data.source import Document, Position
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.data.tokens import describe, num_prepared, open_ends, open_tokens
from mpitrain.errors import DataError, StoppedEarly

BYTES = load_tokenizer("bytes")
FILES = ["ends.bin", "tokens.bin", "tokens.json", "verified.json"]


@pytest.fixture
def corpus(tmp_path):
    return two_texts(tmp_path / "corpus")


@pytest.fixture
def forbid_reading(monkeypatch):
    """Return a function after which `prepare` fails if it reads a document."""

    def documents(*_, **__):
        raise AssertionError("the corpus was read again")

    return lambda: monkeypatch.setattr(preparation_module, "part_documents", documents)


def test_documents_are_joined_by_end_of_text(corpus, tmp_path):
    prepare(Corpus("text", corpus), BYTES, tmp_path / "run" / "data")
    tokens = open_tokens(tmp_path / "run" / "data")
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint8 and not tokens.flags.writeable
    assert tokens.tobytes() == "one\0zwölf".encode()
    assert sorted(os.listdir(tmp_path / "run" / "data")) == [
        "ends.bin",
        "tokens.bin",
        "tokens.json",
        "verified.json",
    ]


def ends_of(folder):
    return open_ends(folder).tolist()


def test_ends_of_documents_lie_next_to_the_tokens(corpus, tmp_path):
    (corpus / "3.txt").write_text("x")
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    assert open_tokens(tmp_path / "data").tobytes() == "one\0zwölf\0x".encode()
    assert ends_of(tmp_path / "data") == [4, 11, 12]


@pytest.mark.parametrize("text", ["a\0b", "\0" * 300, "\0", "x\0"])
def test_a_nul_in_a_text_ends_nothing(tmp_path, text):
    """Files have holes after a crash, JSON has \\u0000: the byte between documents is no text's."""
    lines = [json.dumps({"text": each}) for each in (text, "second")]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    prepare(Corpus("jsonl", tmp_path / "a.jsonl"), BYTES, tmp_path / "data")
    tokens = open_tokens(tmp_path / "data")
    assert (tokens == 0).sum() == 1 and ends_of(tmp_path / "data") == [len(tokens) - 6, len(tokens)]
    assert BYTES.decode(tokens[: -len("\0second")]) == text


def test_ends_of_tokens_without_an_end_of_text(corpus, tmp_path):
    tokenizer = load_tokenizer(words_file(tmp_path / "t.json", {"one": 0, "zwölf": 300}))
    prepare(Corpus("text", corpus), tokenizer, tmp_path / "data")
    assert open_tokens(tmp_path / "data").tolist() == [0, 300]
    assert ends_of(tmp_path / "data") == [1, 2]


@pytest.mark.parametrize("ends", [[4, 9], [4, 11], [10, 10], [-1, 10], [11, 10]])
def test_ends_that_are_none_are_refused_though_the_digest_is_right(corpus, tmp_path, ends):
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    np.array(ends, "<i8").tofile(tmp_path / "data" / "ends.bin")
    described(tmp_path / "data", ends=xxhash.xxh3_128_hexdigest(np.array(ends, "<i8")))
    with pytest.raises(DataError, match=r"ends\.bin holds"):
        prepare(Corpus("text", corpus), BYTES, tmp_path / "data")


@pytest.mark.parametrize("damage", ["gone", "short", "other"])
def test_damaged_ends_are_made_again(corpus, tmp_path, damage):
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    file = tmp_path / "data" / "ends.bin"
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(whole[:8] if damage == "short" else whole[::-1])
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    assert file.read_bytes() == whole


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name in ("a", "b"):
        # within a text it is one
        (tmp_path / f"{name}.txt").write_bytes(b"\xef\xbb\xbf" + name.encode() + b"\xef\xbb\xbfy\r\n")
    prepare(Corpus("text", tmp_path), BYTES, tmp_path.parent / "marks")
    assert open_tokens(tmp_path.parent / "marks").tobytes() == b"a\xef\xbb\xbfy\r\n\0b\xef\xbb\xbfy\r\n"


def test_description_says_what_the_tokens_are(corpus, tmp_path):
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    description = json.loads((tmp_path / "data" / "tokens.json").read_text())
    assert (description["count"], description["dtype"]) == (10, "|u1")
    assert (description["origin"]["source"], description["origin"]["vocab"]) == ("text", 256)
    assert describe(tmp_path / "data").digest == description["digest"]


def test_file_tokenizer_documents_are_joined_by_its_special_token(corpus, tmp_path):
    from tokenizers import Tokenizer, models

    model = Tokenizer(models.WordLevel({"one": 0, "zwölf": 300, "</s>": 2}, unk_token=None))
    model.add_special_tokens(["</s>"])
    model.save(str(tmp_path / "t.json"))
    prepare(Corpus("text", corpus), load_tokenizer(tmp_path / "t.json"), tmp_path / "data")
    tokens = open_tokens(tmp_path / "data")
    assert (tokens.tolist(), tokens.dtype) == ([0, 2, 300], np.uint16)


def test_text_unknown_to_the_tokenizer_is_an_error(corpus, tmp_path):
    from tokenizers import Tokenizer, models

    for model, message in (
        (models.WordLevel({"x": 0}, unk_token=None), "cannot encode"),
        (models.BPE({"x": 0}, []), "gives no tokens"),
    ):
        Tokenizer(model).save(str(tmp_path / "t.json"))
        with pytest.raises(DataError, match=message):
            prepare(Corpus("text", corpus), load_tokenizer(tmp_path / "t.json"), tmp_path / "data")


def test_same_corpus_is_not_read_again(corpus, tmp_path, forbid_reading):
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    forbid_reading()
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    assert len(open_tokens(tmp_path / "data")) == 10


@pytest.mark.parametrize("damage", ["corpus", "tokens", "length", "description"])
def test_changed_corpus_or_damaged_tokens_are_made_again(corpus, tmp_path, damage):
    folder = tmp_path / "data"
    prepare(Corpus("text", corpus), BYTES, folder)
    if damage == "corpus":
        (corpus / "1.txt").write_text("eins")
    elif damage == "tokens":
        (folder / "tokens.bin").write_bytes(b"0123456789")
    elif damage == "length":
        (folder / "tokens.bin").write_bytes(b"0")
    else:
        (folder / "tokens.json").write_text("{")
    prepare(Corpus("text", corpus), BYTES, folder)
    first = "eins" if damage == "corpus" else "one"
    assert open_tokens(folder).tobytes() == f"{first}\0zwölf".encode()


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, OSError(28, "No space left on device"), DataError("broken line")]
)
def test_interrupted_prepare_leaves_nothing_half_written(corpus, tmp_path, monkeypatch, error):
    def documents(*_, **__):
        yield Document("1.txt", b"one", Position(1))
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(preparation_module, "part_documents", documents)
        with pytest.raises((KeyboardInterrupt, DataError)):
            prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []
    with pytest.raises(DataError, match="prepare the tokens first"):
        open_tokens(tmp_path / "data")
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    assert len(open_tokens(tmp_path / "data")) == 10


def test_prepare_killed_between_its_two_files_starts_again(corpus, tmp_path):
    """What a kill leaves: complete tokens under their name, a draft of the description."""
    folder = tmp_path / "data"
    prepare(Corpus("text", corpus), BYTES, folder)
    (folder / "tokens.json").rename(folder / "tokens.json.tmp")
    prepare(Corpus("text", corpus), BYTES, folder)
    assert sorted(os.listdir(folder)) == FILES


def test_full_disk_names_the_folder(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file/data: tokens cannot be written: .*change run\.dir"):
        prepare(Corpus("text", corpus), BYTES, tmp_path / "file" / "data")


def test_open_refuses_tokens_cut_short(corpus, tmp_path):
    prepare(Corpus("text", corpus), BYTES, tmp_path)
    (tmp_path / "tokens.bin").write_bytes(b"123")
    with pytest.raises(DataError, match=r"tokens\.bin has 3 bytes, 10 needed"):
        open_tokens(tmp_path)


def test_stdlib_tokens_are_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        prepare(Corpus("python-stdlib", None), BYTES, tmp_path / name)
    assert describe(tmp_path / "a") == describe(tmp_path / "b")
    assert 5e6 < describe(tmp_path / "a").count < 15e6


# ---------------------------------------------------------------- a data folder of a stranger


def described(folder, **changes):
    """Change the description; `origin` is a mapping within it."""
    description = json.loads((folder / "tokens.json").read_text())
    description["origin"] |= changes.pop("origin", {})
    (folder / "tokens.json").write_text(json.dumps(description | changes))


@pytest.fixture
def words(corpus, tmp_path):
    """Prepared tokens of three words, in two bytes each; and their tokenizer."""
    from tokenizers import Tokenizer, models

    model = Tokenizer(models.WordLevel({"one": 0, "zwölf": 300, "</s>": 2}, unk_token=None))
    model.add_special_tokens(["</s>"])
    model.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    prepare(Corpus("text", corpus), tokenizer, tmp_path / "data")
    return tokenizer


@pytest.mark.parametrize("where", [0, 1, 2, "far"])
def test_ids_beyond_the_vocabulary_are_refused_though_the_digest_is_right(corpus, tmp_path, words, where):
    folder = tmp_path / "data"
    ids = np.zeros(3 if where != "far" else 2_000_000, "<u2")
    ids[-1 if where == "far" else where] = 301
    ids.tofile(folder / "tokens.bin")
    described(folder, count=ids.size, digest=xxhash.xxh3_128_hexdigest(ids))
    before = (folder / "tokens.json").read_bytes()
    with pytest.raises(
        DataError, match=r"data/tokens\.bin holds token 301, the tokenizer has 301; remove it"
    ):
        prepare(Corpus("text", corpus), words, folder)
    assert (folder / "tokens.json").read_bytes() == before
    assert np.fromfile(folder / "tokens.bin", "<u2")[-1] == ids[-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "O"},
        {"dtype": "<u8"},
        {"dtype": "<f2"},
        {"dtype": "V1000000000"},
        {"count": -1},
        {"count": 0},
        {"count": 2**62},
        {"count": "3"},
        {"count": 10**30},
        {"digest": None},
        {"origin": {"vocab": 0}},
        {"origin": {"vocab": 2**40}},
        {"origin": {"vocab": 2**70}},
    ],
    ids=str,
)
def test_descriptions_are_held_against_what_is_written(corpus, tmp_path, words, changes):
    described(tmp_path / "data", **changes)
    with pytest.raises(DataError, match=r"tokens\.json is damaged|bytes, \d+ needed"):
        open_tokens(tmp_path / "data")
    prepare(Corpus("text", corpus), words, tmp_path / "data")
    assert open_tokens(tmp_path / "data").tolist() == [0, 2, 300]


@pytest.mark.parametrize("text", ["[" * 60_000, '{"a":' * 10_000, " " * 100_000, "null", ""])
def test_descriptions_of_any_text_are_refused(corpus, tmp_path, text):
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    (tmp_path / "data" / "tokens.json").write_text(text)
    with pytest.raises(DataError, match=r"tokens\.json"):
        describe(tmp_path / "data")


@pytest.mark.parametrize("what", ["data", "data/tokens.bin", "data/tokens.json"])
@pytest.mark.parametrize("kind", ["a symbolic link", "a FIFO", "the wrong kind"])
def test_what_leads_elsewhere_is_refused(corpus, tmp_path, what, kind):
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    path = tmp_path / what
    away = tmp_path / "away"
    path.rename(away)
    if kind == "a symbolic link":
        path.symlink_to(away)
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif what == "data":
        path.touch()
    else:
        path.mkdir()
    for call in (describe, open_tokens, lambda folder: prepare(Corpus("text", corpus), BYTES, folder)):
        with pytest.raises(DataError, match=f"{path} is a"):
            call(tmp_path / "data")


def test_drafts_are_not_written_through_a_link(corpus, tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "data").mkdir()
    for name in ("tokens.bin.tmp", "tokens.json.tmp"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "precious")
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    assert (tmp_path / "precious").read_text() == "mine"
    assert len(open_tokens(tmp_path / "data")) == 10


def test_tokens_that_cannot_be_read_are_an_error(corpus, tmp_path, monkeypatch):
    """Running as root, permissions refuse nothing: the disk fails instead."""
    prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    (tmp_path / "data/verified.json").unlink()  # or else they aren't read

    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "_blocks", fail)
        with pytest.raises(DataError, match=r"tokens\.bin cannot be read: Input/output error"):
            prepare(Corpus("text", corpus), BYTES, tmp_path / "data")
    monkeypatch.setattr(read_tokens, "open_regular", fail)
    with pytest.raises(DataError, match=r"tokens\.bin cannot be read: Input/output error"):
        open_tokens(tmp_path / "data")


# ---------------------------------------------------------------- tokens that aren't complete yet


@pytest.fixture
def lines(tmp_path):
    """A folder of two JSONL files with empty lines and texts between; the tokens of it, prepared at once."""
    folder = tmp_path / "lines"
    folder.mkdir()
    for name in ("a", "b"):
        texts = [f"{name}{number} zwölf" * (number % 5) for number in range(40)]
        (folder / f"{name}.jsonl").write_text("\n\n".join(json.dumps({"text": text}) for text in texts))
    prepare(Corpus("jsonl", folder), BYTES, tmp_path / "whole")
    return folder


def stops_after(number):
    """Return what raises StoppedEarly at the call after `number` documents."""
    seen = []

    def each(what):
        seen.append(what)
        if len([what for what in seen if what.startswith("preparing")]) > number:
            raise StoppedEarly("tokens", "a test")

    each.seen = seen
    return each


def assert_whole(folder, tmp_path):
    """Whatever happened before, the bytes and the description are those of tokens that were
    prepared at once.
    """
    assert (folder / "tokens.bin").read_bytes() == (tmp_path / "whole" / "tokens.bin").read_bytes()
    assert (folder / "tokens.json").read_bytes() == (tmp_path / "whole" / "tokens.json").read_bytes()
    assert sorted(os.listdir(folder)) == FILES


@pytest.mark.parametrize("documents", [1, 7, 31, 32, 33, 63])
def test_preparation_continues_where_it_was_left(lines, tmp_path, documents):
    """Every start prepares some documents and is asked to leave; 64 of 80 lines have a text, 32 in
    each file.
    """
    folder = tmp_path / "data"
    counts = [0]
    while not (folder / "tokens.json").exists():
        each = stops_after(documents)
        try:
            prepare(Corpus("jsonl", lines), BYTES, folder, report=Reporter(each))
        except StoppedEarly:
            counts.append(num_prepared(folder))
    assert len(counts) == -(-64 // documents) and counts == sorted({*counts})
    assert_whole(folder, tmp_path)
    assert num_prepared(folder) == describe(folder).count


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_what_is_prepared_is_not_encoded_again(lines, corpus, tmp_path, source):
    where = lines if source == "jsonl" else corpus
    with pytest.raises(StoppedEarly):
        prepare(Corpus(source, where), BYTES, tmp_path / "data", report=Reporter(stops_after(1)))
    each = stops_after(1000)
    prepare(Corpus(source, where), BYTES, tmp_path / "data", report=Reporter(each))
    expected = 63 if source == "jsonl" else 1
    assert len([what for what in each.seen if what.startswith("preparing")]) == expected, each.seen
    assert "checking the tokens that were kept" in each.seen


@pytest.mark.parametrize(
    "damage", ["altered", "short", "longer", "origin", "gone", "note", "foreign note", "no note", "link"]
)
def test_kept_tokens_are_checked(lines, tmp_path, damage):
    folder = tmp_path / "data"
    with pytest.raises(StoppedEarly):
        prepare(Corpus("jsonl", lines), BYTES, folder, report=Reporter(stops_after(40)))
    draft = folder / "tokens.bin.tmp"
    note = folder / "tokens.part.json"
    content = draft.read_bytes()
    kept = json.loads(note.read_text())
    assert len(content) == kept["count"]
    if damage == "altered":
        draft.write_bytes(content[:100] + b"?" + content[101:])
    elif damage == "short":
        draft.write_bytes(content[:-1])
    elif damage == "longer":
        # a kill after the next documents were written, and before they were noted
        draft.write_bytes(content + b"torn")
    elif damage == "origin":
        kept["origin"]["vocab"] = 10
        note.write_text(json.dumps(kept))
    elif damage == "gone":
        draft.unlink()
    elif damage == "note":
        note.write_text("[" * 100_000)
    elif damage == "foreign note":
        note.write_text(json.dumps(kept | {"after": {"files": 1, "offset": -3}}))
    elif damage == "no note":
        note.unlink()
    elif damage == "link":
        draft.rename(tmp_path / "elsewhere")
        draft.symlink_to(tmp_path / "elsewhere")
    each = stops_after(1000)
    prepare(Corpus("jsonl", lines), BYTES, folder, report=Reporter(each))
    again = len([what for what in each.seen if what.startswith("preparing")]) == 64
    assert again is (damage != "longer")
    assert_whole(folder, tmp_path)
    assert damage != "link" or (tmp_path / "elsewhere").read_bytes() == content


def test_kept_tokens_of_another_corpus_are_made_again(lines, tmp_path):
    with pytest.raises(StoppedEarly):
        prepare(Corpus("jsonl", lines), BYTES, tmp_path / "data", report=Reporter(stops_after(40)))
    (lines / "a.jsonl").write_text('{"text": "another"}')
    prepare(Corpus("jsonl", lines), BYTES, tmp_path / "data")
    prepare(Corpus("jsonl", lines), BYTES, tmp_path / "whole")
    assert_whole(tmp_path / "data", tmp_path)


def test_a_full_disk_costs_only_what_is_not_noted(lines, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    with pytest.raises(StoppedEarly):
        prepare(Corpus("jsonl", lines), BYTES, folder, report=Reporter(stops_after(40)))
    count = num_prepared(folder)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(draft_module, "KEEP_S", 0)
        patch.setattr(draft_module.os, "fsync", full)
        with pytest.raises(DataError, match=r"tokens cannot be written: No space left on device"):
            prepare(Corpus("jsonl", lines), BYTES, folder)
    assert num_prepared(folder) == count == (folder / "tokens.bin.tmp").stat().st_size
    prepare(Corpus("jsonl", lines), BYTES, folder)
    assert_whole(folder, tmp_path)


KILLED = """
import os, sys
from mpitrain.data import draft
from mpitrain.data.corpus import Corpus
from mpitrain.data.preparation import Reporter, prepare
from mpitrain.data.tokenizer import load_tokenizer
draft.KEEP_S, calls = 0.0, []
def each(what):  # what is read ahead of the tokens is lost by a kill
    if what.startswith("preparing"):
        calls.append(what)
    if len(calls) > int(sys.argv[3]):
        os.kill(os.getpid(), 9)
prepare(Corpus("jsonl", sys.argv[1]), load_tokenizer("bytes"), sys.argv[2], report=Reporter(each))
"""


def test_killed_again_and_again_preparation_gets_on(lines, tmp_path):
    folder = tmp_path / "data"
    kills = 0
    while not (folder / "tokens.json").exists():
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(lines), str(folder), "13"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        kills += done.returncode == -9
        assert done.returncode in (0, -9), done.stderr
        assert kills < 10
    assert kills >= 4
    assert_whole(folder, tmp_path)


@LONG
def test_a_long_text_leaves_other_threads_their_time(tmp_path):
    """A thread hears signals and sees that time is over.

    An encode() that holds Python's lock would keep it waiting to the end.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE({chr(c): c - 33 for c in range(33, 127)} | {"Ġ": 94, "ab": 95}, [("a", "b")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "t.json"))
    found = load_tokenizer(tmp_path / "t.json")
    over = threading.Event()
    looks = []

    def look():
        while not over.wait(0.01):
            looks.append(time.monotonic())

    thread = threading.Thread(target=look)
    thread.start()
    begin = time.monotonic()
    found.encode(b"ab cd " * 400_000)
    end = time.monotonic()
    over.set()
    thread.join()
    inside = [begin, *(look for look in looks if begin < look < end), end]
    longest = max(after - before for before, after in zip(inside, inside[1:]))
    assert longest < (end - begin) / 2, f"{longest:.2f} of {end - begin:.2f} s"


# -------------------------------------------------------------- what was read and what was left out


def reported(path, source, folder, **options):
    prepare(Corpus(source, path, **options), BYTES, folder)
    found = describe(folder)
    return found.tally.describe(found.count)


def test_everything_that_is_not_read_is_counted_by_its_reason(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.jsonl").write_text('{"text": "eins"}\n\n{"text": ""}\n')
    for name in ("b.JSONL", "f.ndjson", "sub/g.jsonl"):
        (folder / name).write_text(json.dumps({"text": name}))
    (folder / "copy.jsonl").write_bytes((folder / "a.jsonl").read_bytes())
    (folder / "link.jsonl").symlink_to("a.jsonl")
    (folder / "h.jsonl").touch()
    for name in ("c.json", "d.text.gz", ".hidden.jsonl"):
        (folder / name).write_text("{}")
    os.mkfifo(folder / "pipe.jsonl")
    found = reported(folder, "jsonl", tmp_path / "data")
    assert found.startswith("4 files, 4 documents, 30 bytes, 33 tokens; left out: ")
    assert sorted(found.partition("left out: ")[2].split(", ")) == sorted(
        [
            "1 without text (a.jsonl:3)",
            "1 JSON that is no lines of JSON (c.json)",
            "1 gzip (d.text.gz)",
            "1 hidden (.hidden.jsonl)",
            "1 no files (pipe.jsonl)",
            "1 empty (h.jsonl)",
            "2 duplicates of an earlier file (copy.jsonl)",
        ]
    )


def test_linked_folders_are_read_once_and_links_that_lead_back_are_not_followed(tmp_path):
    (tmp_path / "disk" / "part").mkdir(parents=True)
    (tmp_path / "corpus").mkdir()
    for number in range(3):
        (tmp_path / "disk" / "part" / f"{number}.txt").write_text(f"far {number}")
    (tmp_path / "corpus" / "near.txt").write_text("near")
    (tmp_path / "corpus" / "part").symlink_to("../disk/part")
    (tmp_path / "corpus" / "twice").symlink_to("../disk/part")
    (tmp_path / "disk" / "part" / "back").symlink_to(tmp_path / "corpus")
    found = reported(tmp_path / "corpus", "text", tmp_path / "data")
    assert (
        found
        == "4 files, 4 documents, 19 bytes, 22 tokens; left out: 2 duplicates of an earlier file (twice)"
    )


@pytest.mark.parametrize(
    "head", [b"\x1f\x8b\x08", b"\x89PNG\r\n\x1a\n\0\0\xff", b"PAR1\xff", b"%PDF-1.4\n\xff", b"\x7fELF\0\xff"]
)
def test_what_is_no_text_in_a_folder_of_text_is_left_out(corpus, tmp_path, head):
    (corpus / "0.bin").write_bytes(head + bytes(range(256)))
    found = reported(corpus, "text", tmp_path / "data")
    assert found.startswith("3 files, 2 documents, ")
    assert "1 no text but " in found
    assert "(0.bin)" in found
    with pytest.raises(DataError, match="not UTF-8 text"):
        prepare(Corpus("text", corpus / "0.bin"), BYTES, tmp_path / "one")


def test_tokens_that_are_kept_know_what_was_left_out(lines, tmp_path):
    folder = tmp_path / "data"
    for number in range(64):
        with pytest.raises(StoppedEarly):
            prepare(Corpus("jsonl", lines), BYTES, folder, report=Reporter(stops_after(5)))
        if number == 10:
            break
    prepare(Corpus("jsonl", lines), BYTES, folder)
    assert describe(folder) == describe(tmp_path / "whole")
    assert describe(folder).tally.left_out["without text"].count == 16


def test_unknown_tokens_are_counted(corpus, tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"one": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "t.json"))
    prepare(Corpus("text", corpus), load_tokenizer(tmp_path / "t.json"), tmp_path / "data")
    assert "2 tokens; 1 tokens (50.0%) are unknown to the tokenizer" in describe(
        tmp_path / "data"
    ).tally.describe(2)


def test_each_document_begins_and_ends_as_it_is_asked_for(tmp_path):
    from tokenizers import Tokenizer, models

    model = Tokenizer(models.WordLevel({"one": 0, "two": 1, "<s>": 2, "</s>": 3}, unk_token=None))
    model.add_special_tokens(["<s>", "</s>"])
    model.save(str(tmp_path / "t.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": "one"}')
    for named, ids, ends in (
        ((None, "<s>"), [2, 0, 3, 2, 1, 3, 2, 0], [3, 6, 8]),
        (("", "<s>"), [2, 0, 2, 1, 2, 0], [2, 4, 6]),
        (("", ""), [0, 1, 0], [1, 2, 3]),
        (("<s>", None), [0, 2, 1, 2, 0], [2, 4, 5]),
    ):
        prepare(
            Corpus("jsonl", tmp_path / "a.jsonl"),
            load_tokenizer(tmp_path / "t.json", *named),
            tmp_path / "data",
        )
        assert open_tokens(tmp_path / "data").tolist() == ids and ends_of(tmp_path / "data") == ends


# ---------------------------------------------------------------- a corpus of which files are gone


@pytest.mark.parametrize(
    "change", ["one gone", "all but one gone", "another written", "one altered", "damaged", "not trained on"]
)
def test_tokens_that_a_run_has_trained_on_outlive_files_of_the_corpus(
    corpus, tmp_path, forbid_reading, change
):
    (corpus / "3.txt").write_text("three")
    folder = tmp_path / "data"
    said = []
    prepare(Corpus("text", corpus), BYTES, folder)
    trained = describe(folder).content
    for name in {"one gone": "1", "all but one gone": "23"}.get(change, "1"):
        (corpus / f"{name}.txt").unlink()
    later = time.time() + 5
    for name in {"another written": "4", "one altered": "2"}.get(change, ""):
        (corpus / f"{name}.txt").write_text("later")
        os.utime(corpus / f"{name}.txt", (later, later))
    if change == "another written":
        (corpus / "3.txt").unlink()
    if change == "damaged":
        (folder / "tokens.bin").write_bytes(b"?" * len(open_tokens(folder)))
    if "gone" in change:
        forbid_reading()
    report = Reporter(line=said.append)
    known = "" if change == "not trained on" else trained
    prepare(Corpus("text", corpus), BYTES, folder, report=report, trained=known)
    kept = f"data.path: {2 if 'all' in change else 1} of 3 files are gone; using the tokens in {folder}"
    kept += ", which the run has trained on"
    assert said == [kept] if "gone" in change else kept not in said
    assert (describe(folder).content == trained) == ("gone" in change)

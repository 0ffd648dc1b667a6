"""Prepared tokens: complete or absent, reused while the corpus is the same, made anew when it is not."""

import json
import os

import numpy as np
import pytest
import xxhash

from mpitrain.data import tokens as tokens_module
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.data.tokens import describe, open_tokens, prepare
from mpitrain.errors import DataError

BYTES = load_tokenizer("bytes")


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "1.txt").write_text("one")
    (folder / "2.txt").write_text("zwölf")
    return folder


@pytest.fixture
def forbid_reading(monkeypatch):
    """Return a function after which `prepare` fails if it reads a document."""

    def documents(*_):
        raise AssertionError("the corpus was read again")

    return lambda: monkeypatch.setattr(tokens_module, "documents", documents)


def test_documents_are_joined_by_end_of_text(corpus, tmp_path):
    prepare("text", corpus, BYTES, tmp_path / "run" / "data")
    tokens = open_tokens(tmp_path / "run" / "data")
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint8 and not tokens.flags.writeable
    assert tokens.tobytes() == "one\0zwölf".encode()
    assert sorted(os.listdir(tmp_path / "run" / "data")) == ["tokens.bin", "tokens.json"]


def test_description_tells_what_the_tokens_are(corpus, tmp_path):
    prepare("text", corpus, BYTES, tmp_path / "data")
    description = json.loads((tmp_path / "data" / "tokens.json").read_text())
    assert (description["count"], description["dtype"]) == (10, "|u1")
    assert (description["origin"]["source"], description["origin"]["vocab"]) == ("text", 256)
    assert describe(tmp_path / "data").digest == description["digest"]


def test_file_tokenizer_documents_are_joined_by_its_special_token(corpus, tmp_path):
    from tokenizers import Tokenizer, models

    model = Tokenizer(models.WordLevel({"one": 0, "zwölf": 300, "</s>": 2}, unk_token=None))
    model.save(str(tmp_path / "t.json"))
    prepare("text", corpus, load_tokenizer(tmp_path / "t.json"), tmp_path / "data")
    tokens = open_tokens(tmp_path / "data")
    assert (tokens.tolist(), tokens.dtype) == ([0, 2, 300], np.uint16)


def test_text_unknown_to_the_tokenizer_is_an_error(corpus, tmp_path):
    from tokenizers import Tokenizer, models

    for model, message in ((models.WordLevel({"x": 0}, unk_token=None), "cannot encode"), (models.BPE({"x": 0}, []), "gives no tokens")):
        Tokenizer(model).save(str(tmp_path / "t.json"))
        with pytest.raises(DataError, match=message):
            prepare("text", corpus, load_tokenizer(tmp_path / "t.json"), tmp_path / "data")


def test_same_corpus_is_not_read_again(corpus, tmp_path, forbid_reading):
    prepare("text", corpus, BYTES, tmp_path / "data")
    forbid_reading()
    prepare("text", corpus, BYTES, tmp_path / "data")
    assert len(open_tokens(tmp_path / "data")) == 10


@pytest.mark.parametrize("damage", ["corpus", "tokens", "length", "description"])
def test_changed_corpus_or_damaged_tokens_are_made_anew(corpus, tmp_path, damage):
    folder = tmp_path / "data"
    prepare("text", corpus, BYTES, folder)
    if damage == "corpus":
        (corpus / "1.txt").write_text("eins")
    elif damage == "tokens":
        (folder / "tokens.bin").write_bytes(b"0123456789")
    elif damage == "length":
        (folder / "tokens.bin").write_bytes(b"0")
    else:
        (folder / "tokens.json").write_text("{")
    prepare("text", corpus, BYTES, folder)
    first = "eins" if damage == "corpus" else "one"
    assert open_tokens(folder).tobytes() == f"{first}\0zwölf".encode()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device"), DataError("broken line")])
def test_interrupted_prepare_leaves_nothing_half_written(corpus, tmp_path, monkeypatch, error):
    def documents(*_):
        yield "1.txt", b"one"
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "documents", documents)
        with pytest.raises((KeyboardInterrupt, DataError)):
            prepare("text", corpus, BYTES, tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []
    with pytest.raises(DataError, match="prepare the tokens first"):
        open_tokens(tmp_path / "data")
    prepare("text", corpus, BYTES, tmp_path / "data")
    assert len(open_tokens(tmp_path / "data")) == 10


def test_prepare_killed_between_its_two_files_starts_again(corpus, tmp_path):
    """What a kill leaves: complete tokens under their name, a draft of the description."""
    folder = tmp_path / "data"
    prepare("text", corpus, BYTES, folder)
    (folder / "tokens.json").rename(folder / "tokens.json.tmp")
    prepare("text", corpus, BYTES, folder)
    assert sorted(os.listdir(folder)) == ["tokens.bin", "tokens.json"]


def test_full_disk_names_the_folder(corpus, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file/data: tokens cannot be written: .*change run\.dir"):
        prepare("text", corpus, BYTES, tmp_path / "file" / "data")


def test_open_refuses_tokens_cut_short(corpus, tmp_path):
    prepare("text", corpus, BYTES, tmp_path)
    (tmp_path / "tokens.bin").write_bytes(b"123")
    with pytest.raises(DataError, match=r"tokens\.bin has 3 bytes, 10 needed"):
        open_tokens(tmp_path)


def test_stdlib_tokens_are_the_same_every_time(tmp_path):
    for name in ("a", "b"):
        prepare("python-stdlib", None, BYTES, tmp_path / name)
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

    Tokenizer(models.WordLevel({"one": 0, "zwölf": 300, "</s>": 2}, unk_token=None)).save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    prepare("text", corpus, tokenizer, tmp_path / "data")
    return tokenizer


@pytest.mark.parametrize("where", [0, 1, 2, "far"])
def test_ids_beyond_the_vocabulary_are_refused_though_the_digest_is_right(corpus, tmp_path, words, where):
    folder = tmp_path / "data"
    ids = np.zeros(3 if where != "far" else 2_000_000, "<u2")
    ids[-1 if where == "far" else where] = 301
    ids.tofile(folder / "tokens.bin")
    described(folder, count=ids.size, digest=xxhash.xxh3_128_hexdigest(ids))
    before = (folder / "tokens.json").read_bytes()
    with pytest.raises(DataError, match=r"data/tokens\.bin holds token 301, the tokenizer has 301; remove it"):
        prepare("text", corpus, words, folder)
    assert (folder / "tokens.json").read_bytes() == before and np.fromfile(folder / "tokens.bin", "<u2")[-1] == ids[-1]


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
    prepare("text", corpus, words, tmp_path / "data")
    assert open_tokens(tmp_path / "data").tolist() == [0, 2, 300]


@pytest.mark.parametrize("text", ["[" * 60_000, '{"a":' * 10_000, " " * 100_000, "null", ""])
def test_descriptions_of_any_text_are_refused(corpus, tmp_path, text):
    prepare("text", corpus, BYTES, tmp_path / "data")
    (tmp_path / "data" / "tokens.json").write_text(text)
    with pytest.raises(DataError, match=r"tokens\.json"):
        describe(tmp_path / "data")


@pytest.mark.parametrize("what", ["data", "data/tokens.bin", "data/tokens.json"])
@pytest.mark.parametrize("kind", ["a symbolic link", "a FIFO", "the wrong kind"])
def test_what_leads_elsewhere_is_refused(corpus, tmp_path, what, kind):
    prepare("text", corpus, BYTES, tmp_path / "data")
    path, away = tmp_path / what, tmp_path / "away"
    path.rename(away)
    if kind == "a symbolic link":
        path.symlink_to(away)
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif what == "data":
        path.touch()
    else:
        path.mkdir()
    for call in (describe, open_tokens, lambda folder: prepare("text", corpus, BYTES, folder)):
        with pytest.raises(DataError, match=f"{path} is a"):
            call(tmp_path / "data")


def test_drafts_are_not_written_through_a_link(corpus, tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "data").mkdir()
    for name in ("tokens.bin.tmp", "tokens.json.tmp"):
        (tmp_path / "data" / name).symlink_to(tmp_path / "precious")
    prepare("text", corpus, BYTES, tmp_path / "data")
    assert (tmp_path / "precious").read_text() == "mine" and len(open_tokens(tmp_path / "data")) == 10


def test_tokens_that_cannot_be_read_are_an_error(corpus, tmp_path, monkeypatch):
    """Running as root, permissions refuse nothing: the disk fails instead."""
    prepare("text", corpus, BYTES, tmp_path / "data")

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "_blocks", fail)
        with pytest.raises(DataError, match=r"tokens\.bin cannot be read: Input/output error"):
            prepare("text", corpus, BYTES, tmp_path / "data")
    monkeypatch.setattr(tokens_module, "open_regular", fail)
    with pytest.raises(DataError, match=r"tokens\.bin cannot be read: Input/output error"):
        open_tokens(tmp_path / "data")

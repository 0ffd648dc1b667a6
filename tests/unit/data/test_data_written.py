"""Prepared tokens: what is counted in them, and what other formats give when they are read again."""

import struct
from functools import partial
from itertools import chain

import corpus_formats as formats
import numpy as np
import pytest

from mpitrain.commands.data.inspection import convert, inspect
from mpitrain.data.corpus import Corpus
from mpitrain.data.preparation import prepare
from mpitrain.data.statistics import statistics_of
from mpitrain.data.token_export import write_tokens
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.data.tokens import describe, open_tokens
from mpitrain.errors import DataError

BYTES = load_tokenizer("bytes")
DOCUMENTS = [[65 + n % 9] * (n % 7 + 1) + [66, n % 200 + 1] for n in range(60)]


def prepared(folder, path):
    prepare(Corpus("auto", path), BYTES, folder)
    return folder


@pytest.fixture
def stored(tmp_path):
    (tmp_path / "from").mkdir()
    return prepared(tmp_path / "data", formats.jsonl(tmp_path / "from", DOCUMENTS))


@pytest.mark.parametrize("name", ["a.bin", "a.ds", "a.npy"])
def test_what_is_written_is_read_again(tmp_path, stored, name):
    (tmp_path / "to").mkdir()
    files = write_tokens(stored, tmp_path / "to" / name)
    assert {path.name for path in files} == {path.name for path in (tmp_path / "to").iterdir()}
    again = prepared(tmp_path / "again", tmp_path / "to" / name)
    assert describe(again).content == describe(stored).content


@pytest.mark.parametrize("name", ["a.ds", "a.npy"])
def test_masks_are_written_too(tmp_path, name):
    (tmp_path / "from").mkdir()
    scored = [[n % 3 != 0 for n in range(len(document) + 1)] for document in DOCUMENTS]
    masked = formats.datatrove(tmp_path / "from", DOCUMENTS, list(chain(*scored)))
    stored = prepared(tmp_path / "data", masked)
    (tmp_path / "to").mkdir()
    write_tokens(stored, tmp_path / "to" / name)
    again = prepared(tmp_path / "again", tmp_path / "to" / name)
    assert describe(stored).unscored and describe(again).content == describe(stored).content
    with pytest.raises(DataError, match="hold no loss masks"):
        write_tokens(stored, tmp_path / "to" / "a.bin")
    assert not (tmp_path / "to" / "a.bin").exists()


def test_an_export_is_whole_or_not_there(tmp_path, stored):
    (tmp_path / "a.idx").mkdir()
    with pytest.raises(DataError, match=r"a\.bin cannot be written: Is a directory"):
        convert(str(stored), str(tmp_path / "a.bin"))
    assert not list(tmp_path.glob("a.bin*"))


def test_an_export_is_refused_where_a_mask_of_other_tokens_is(tmp_path, stored):
    (tmp_path / "a.ds.loss").write_bytes(b"\1" * 9)
    with pytest.raises(DataError, match=r"a\.ds\.loss of other tokens would be read with it"):
        convert(str(stored), str(tmp_path / "a.ds"))
    assert not (tmp_path / "a.ds").exists()


def test_an_export_replaces_no_file(tmp_path, stored):
    convert(str(stored), str(tmp_path / "a.npy"))
    with pytest.raises(DataError, match=r"a\.npy already exists; give a new name"):
        convert(str(stored), str(tmp_path / "a.npy"))


def test_an_index_of_megatron_has_its_published_layout(tmp_path, stored):
    write_tokens(stored, tmp_path / "a.bin")
    index = (tmp_path / "a.idx").read_bytes()
    assert struct.unpack_from("<9sQBQQ", index) == (b"MMIDIDX\0\0", 1, 8, 60, 61)
    lengths = np.frombuffer(index, "<i4", 60, 34)
    offsets = np.frombuffer(index, "<i8", 60, 34 + 240)
    assert lengths.tolist() == [len(document) + 1 for document in DOCUMENTS]
    ids = np.frombuffer((tmp_path / "a.bin").read_bytes(), "<u2")
    for document, offset, length in zip(DOCUMENTS, offsets.tolist(), lengths.tolist(), strict=True):
        assert ids[offset // 2 : offset // 2 + length].tolist() == [*document, 0]
    assert ids[:-1].tolist() == open_tokens(stored).tolist()


def test_faults_of_a_corpus_are_counted():
    documents = [[1, 1, 5, 6, 9], [7] * 30 + [8, 9], [5, 6, 9], [1, 5, 9], [5, 6, 9], [5, 6]]
    ends = np.cumsum([len(document) for document in documents])
    found = statistics_of(np.array(list(chain(*documents))), ends, 9, 1)
    assert (found.documents, found.tokens, found.lengths[0], found.lengths[-1]) == (6, 48, 2, 32)
    assert (found.duplicates, found.most_copies, found.example) == (2, 3, 2)
    assert found.double_begins == (1, 0) and found.constant == (1, 1)


def test_copies_of_validation_documents_are_counted_without_a_run(tmp_path):
    (tmp_path / "train.jsonl").write_text(
        '{"text": "one"}\n{"text": "two"}\n{"text": "one"}\n{"text": "on"}\n'
    )
    (tmp_path / "val.jsonl").write_text('{"text": "one"}\n{"text": "three"}\n')
    prepare(Corpus("jsonl", tmp_path / "train.jsonl", tmp_path / "val.jsonl"), BYTES, tmp_path / "data")
    found = inspect(str(tmp_path / "data"), None, 0, as_json=False)
    assert "copies of held-out documents, left out of training: 2\n" in found


@pytest.mark.parametrize("name", ["tokens.bin", "ends.bin", "tokens.json"])
def test_damaged_tokens_are_refused_by_inspect_and_convert(tmp_path, stored, name):
    content = (stored / name).read_bytes()
    damages = [content[:-3], content[:8] + b"\xff" * 5 + content[13:]]
    if name == "tokens.json":
        damages = [content.replace(b'"end_of_text": 0', b'"end_of_text": 256')]
    for damaged in damages:
        assert damaged != content
        (stored / name).write_bytes(damaged)
        for command in (partial(inspect, tokenizer_file=None, samples=2, as_json=False), convert):
            with pytest.raises(DataError, match=r"prepare them again|is damaged|needed"):
                command(str(stored), *[str(tmp_path / "a.ds")] * (command is convert))
    assert not (tmp_path / "a.ds").exists()

"""Bytes and tokenizers files: ids, the way back, and the token between documents."""

import sys

import numpy as np
import pytest
from launch import words_file

from mpitrain.config import Data
from mpitrain.data.tokenizer import dtype_for, load_tokenizer, separator
from mpitrain.errors import DataError

TEXT = "def naïve(模型): return 🚀\0\n"


def bpe_file(path, special=("<|endoftext|>",)):
    """Train a byte-level BPE of 300 tokens and save it with the truncation and padding of its last use."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["return the return of the thing"] * 9, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    return path


def test_bytes_come_back():
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(TEXT.encode())
    assert (tokenizer.vocab, tokenizer.end_of_text, ids.dtype) == (256, 0, np.uint8)
    assert ids.tolist() == list(TEXT.encode())
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == TEXT


def test_bytes_cut_inside_a_character_decode_to_a_mark():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode(list("aé".encode()[:2])) == "a\ufffd"


def test_file_tokenizer_round_trip_without_padding_or_truncation(tmp_path):
    tokenizer = load_tokenizer(str(bpe_file(tmp_path / "tokenizer.json")))
    ids = tokenizer.encode(TEXT.encode())
    assert ids.dtype == np.uint16
    assert len(ids) > 4 and ids.max() < tokenizer.vocab
    assert tokenizer.decode(ids) == TEXT


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "[SEP]"])
def test_file_tokenizer_finds_its_end_of_text(tmp_path, name):
    tokenizer = load_tokenizer(bpe_file(tmp_path / "tokenizer.json", special=("<pad>", name)))
    assert tokenizer.decode([tokenizer.end_of_text]) == name


def test_file_tokenizer_without_end_of_text(tmp_path):
    assert load_tokenizer(words_file(tmp_path / "t.json", {"a": 0, "b": 1})).end_of_text is None


def test_joined_documents_have_no_separator(tmp_path):
    assert separator(Data(), load_tokenizer("bytes")) is None
    assert separator(Data(), load_tokenizer(words_file(tmp_path / "t.json", {"a": 0}))) is None


def test_separate_documents_end_with_the_end_of_text_of_the_tokenizer(tmp_path):
    tokenizer = load_tokenizer(bpe_file(tmp_path / "t.json", special=("<pad>", "</s>")))
    assert tokenizer.decode([separator(Data(documents="separate"), tokenizer)]) == "</s>"


def test_a_tokenizer_without_end_of_text_cannot_separate_documents(tmp_path):
    file = str(words_file(tmp_path / "t.json", {"a": 0, "b": 1}))
    with pytest.raises(DataError, match=r't.json" has none of <\|endoftext\|>.*; use another tokenizer, or data.documents = "joined"'):
        separator(Data(documents="separate", tokenizer=file), load_tokenizer(file))


def test_vocab_covers_ids_with_gaps(tmp_path):
    tokenizer = load_tokenizer(words_file(tmp_path / "t.json", {"a": 0, "b": 70000}))
    assert tokenizer.vocab == 70001
    assert tokenizer.encode(b"b a b").tolist() == [70000, 0, 70000]
    assert tokenizer.encode(b"").dtype == np.uint32


def test_identity_follows_the_content_of_the_file(tmp_path):
    one, two = (load_tokenizer(words_file(tmp_path / f"{word}.json", {word: 0})) for word in "ab")
    again = load_tokenizer(words_file(tmp_path / "copy.json", {"a": 0}))
    assert one.identity == again.identity != two.identity


@pytest.mark.parametrize(("vocab", "name"), [(2, "u1"), (256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4")])
def test_dtype_is_the_smallest_that_holds_every_id(vocab, name):
    assert dtype_for(vocab) == np.dtype(f"<{name}")


def test_wrong_tokenizers_are_named(tmp_path):
    with pytest.raises(DataError, match=r'data\.tokenizer = "byte" cannot be read: .*use "bytes"'):
        load_tokenizer("byte")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        load_tokenizer(tmp_path)
    for content in (b"not json", b"\xff", b"{}"):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(DataError, match=r"t\.json\" is not a tokenizers JSON file"):
            load_tokenizer(tmp_path / "t.json")
    with pytest.raises(DataError, match="empty vocabulary"):
        load_tokenizer(words_file(tmp_path / "empty.json", {}))


def test_missing_library_says_how_to_install_it(tmp_path, monkeypatch):
    path = words_file(tmp_path / "t.json", {"a": 0})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'mpitrain\[hf\]'"):
        load_tokenizer(path)

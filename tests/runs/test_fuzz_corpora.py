"""Random corpora and tokenizers: each is read, or refused with one message.

MPITRAIN_EFFORT=500 tries as many, MPITRAIN_EFFORT=all 500.
"""

import json
import os
import random
import socket

import pytest
from effort import cases

from mpitrain.data.corpus import Corpus, documents
from mpitrain.data.corpus_files import check_source
from mpitrain.data.preparation import prepare
from mpitrain.data.token_dtype import dtype_for
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.data.tokens import open_tokens
from mpitrain.errors import BAD_INPUT, DataError

COUNT = cases(80, 500)

TEXTS = [
    *(
        b"",
        b" ",
        b"\n",
        b"a text\n",
        "ü 模型 🚀\n".encode(),
        b"\0",
        b"\0" * 5000,
        b"\xff\xfe",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbfx",
        b"x" * 100_000,
    ),
    *(
        b'{"text": "x"}\n',
        b'{"text": ""}\n',
        b'{"text": 3}\n',
        b'{"text": "\\ud800"}\n',
        b'{"text": "x", "n": ' + b"9" * 5000 + b"}\n",
    ),
    *(
        b"[" * 100_000 + b"]" * 100_000,
        b'{"text": ' + b"[" * 100_000,
        b'{"text": "x"',
        b"null\n",
        b"{}\n",
        b'{"text": "x", "y": ' + b'{"a":' * 3000,
    ),
    *(b'{"text": "x"}\r\n{"text": "\\u0000"}\n', b'{"text": "\x1b[31m"}\n', b'{"te\\u0078t": "y"}\n'),
]
NAMES = [
    b"a.txt",
    b"b.jsonl",
    b"c.jsonl",
    b"caf\xe9.txt",
    "模🚀.txt".encode(),
    b".hidden",
    b"line\nbreak.txt",
    b"\x1b[31m.txt",
    b"x" * 250,
    b"-rf.txt",
]

WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "model": WORDS,
}
ODD = [
    None,
    True,
    -1,
    0,
    2**31,
    2**32,
    2**64,
    10**400,
    1e308,
    "",
    "x" * 5000,
    "\0",
    [],
    {},
    [[]],
    {"type": "x"},
    {"a": -1},
    {"a": 2**32 - 1},
]


def fill(folder: bytes, dice: random.Random) -> None:
    """Put odd files, and what are none, into a folder."""
    for _ in range(dice.randrange(1, 4)):
        path = os.path.join(folder, dice.choice(NAMES))
        if os.path.lexists(path):
            continue
        match dice.randrange(12):
            case 0:
                os.mkfifo(path)
            case 1:
                os.symlink(path, path)
            case 2:
                os.symlink(
                    dice.choice(
                        (b"/dev/zero", b"/dev/null", b"absent", b"..", b"/proc/self/mem", b"/proc/self/maps")
                    ),
                    path,
                )
            case 3:
                os.makedirs(os.path.join(path, *[b"d"] * dice.choice((1, 50))))
            case 4:
                with open(path, "wb") as file:
                    file.truncate(10 << 30)
            case _:
                with open(path, "wb") as file:
                    file.write(b"".join(dice.choice(TEXTS) for _ in range(dice.randrange(1, 4))))


def damaged(dice: random.Random) -> bytes:
    """Return a tokenizer's file with a value changed, or torn, or something else altogether."""
    tree = json.loads(json.dumps(TOKENIZER))
    at = tree if dice.random() < 0.5 else tree["model"]
    at[dice.choice([*at, "truncation", "padding", "decoder", "post_processor"])] = dice.choice(ODD)
    content = json.dumps(tree).encode()
    match dice.randrange(6):
        case 0:
            return content[: dice.randrange(len(content))]
        case 1:
            return dice.choice(TEXTS)
        case 2:
            place = dice.randrange(len(content))
            return content[:place] + bytes([dice.randrange(256)]) + content[place + 1 :]
    return content


def refusal(error: DataError) -> None:
    text = str(error)
    assert error.exit_code == BAD_INPUT and len(text) < 2500 and text.isprintable(), text
    text.encode()


@pytest.mark.parametrize("number", range(COUNT))
def test_a_corpus_is_read_or_refused(tmp_path, number):
    dice = random.Random(number)
    folder = os.fsencode(tmp_path / "corpus")
    os.mkdir(folder)
    fill(folder, dice)
    inside = [os.path.join(folder, name) for name in os.listdir(folder)]
    path = os.fsdecode(dice.choice([folder, folder, *inside]))
    if number % 50 == 0:
        path = dice.choice(
            ("a\0b", "/dev/zero", "/dev/null", "/proc/self/mem", "/proc/self/environ", "x" * 300, "\ud800")
        )
    source = dice.choice(("text", "jsonl"))
    path = os.fsdecode(folder) if "\udce9" in path else path  # which the configuration refuses
    try:
        check_source(source, path)
        list(documents(Corpus(source, path)))
        prepare(Corpus(source, path), load_tokenizer("bytes"), tmp_path / "data")
        assert len(open_tokens(tmp_path / "data"))
    except DataError as error:
        refusal(error)
        assert not (tmp_path / "data" / "tokens.json").exists()


@pytest.mark.parametrize("piece", range(10))
def test_a_tokenizer_is_read_or_refused(tmp_path, piece):
    dice = random.Random(piece)
    file = tmp_path / "t.json"
    for _ in range(COUNT // 10):
        file.write_bytes(damaged(dice))
        try:
            tokenizer = load_tokenizer(str(file))
            assert dtype_for(tokenizer.vocab).itemsize <= 8
            tokenizer.decode(tokenizer.encode("a b c ü 🚀 \0".encode()))
        except DataError as error:
            refusal(error)


def test_what_is_no_tokenizer_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listening, open(tmp_path / "sparse", "wb") as file:
        listening.bind(str(tmp_path / "socket")[-100:] if len(str(tmp_path)) < 90 else "\0mpitrain")
        file.truncate(10 << 30)
        for name in (
            "fifo",
            "sparse",
            "socket",
            ".",
            "a\0b",
            "x" * 300,
            "/dev/zero",
            "/proc/self/mem",
            "/proc/self/environ",
            "\ud800",
        ):
            with pytest.raises(DataError) as caught:
                load_tokenizer(tmp_path / name)
            refusal(caught.value)

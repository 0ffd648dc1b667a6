"""All ranks tokenize together: the same bytes whatever their number; who helps, and what is said
meanwhile.
"""

import json

import pytest
from conftest import agree
from launch import words_file

from mpitrain.comm.base.world import NULL_REPORTER, World
from mpitrain.config import Data
from mpitrain.data import encoding
from mpitrain.data.corpus import Corpus
from mpitrain.data.encoding import DocumentPiece
from mpitrain.data.pace import Pace
from mpitrain.data.preparation import Reporter, prepare
from mpitrain.data.source import Document, Position
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.data.tokens import describe
from mpitrain.errors import DataError, StoppedEarly
from mpitrain.training import tokenizing
from mpitrain.training.tokenizing import OneTokenizer

VOCABULARY = {word: number for number, word in enumerate(["one", "two", "three", "four", "five"])}
LINES = 600


@pytest.fixture
def given(world, tmp_path, monkeypatch):
    """A folder that all ranks see: a tokenizer, a JSONL file of many shares, and the tokens of one rank."""
    folder = world.bcast(tmp_path)
    monkeypatch.setattr(encoding, "SHARE_BYTES", 600)
    monkeypatch.setattr(tokenizing, "SHARE_BYTES", 600)
    if world.rank == 0:
        words_file(folder / "t.json", VOCABULARY)
        texts = [" ".join([*VOCABULARY][: number % 6] * (number % 7)) for number in range(LINES)]
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare(Corpus("jsonl", folder / "a.jsonl"), load_tokenizer(folder / "t.json"), folder / "alone")
    world.Barrier()
    return folder


def tokenize(world, folder, target, each=lambda what: None, text="a.jsonl"):
    """Tokenize on all ranks; return how many ranks encoded."""
    ranks = World(world, NULL_REPORTER)
    shares = []
    data = Data(source="jsonl", path=str(folder / text), tokenizer=str(folder / "t.json"))
    tokenizer = OneTokenizer(ranks, data)
    tokenizer.read(lambda: load_tokenizer(data.tokenizer))

    def encoder(*given):
        found = tokenizer.encoder(*given)
        shares.append(found.num_ranks)
        return found

    def action():
        corpus = Corpus("jsonl", folder / text)
        prepare(corpus, tokenizer.whole, folder / target, report=Reporter(each), encoder_of=encoder)

    ranks.on_first_rank("tokenizing", action, tokenizer.help)
    return shares


def files_of(folder):
    return [(folder / name).read_bytes() for name in ("tokens.bin", "ends.bin")]


@pytest.mark.mpi(min_size=1)
def test_tokens_are_the_same_whatever_the_number_of_ranks(world, given):
    shares = tokenize(world, given, "together")
    agree(world, files_of(given / "together") == files_of(given / "alone"))
    agree(world, describe(given / "together").digest == describe(given / "alone").digest)
    agree(world, shares == [world.size] * (world.rank == 0), shares)


def stops_after(number):
    """Return what raises StoppedEarly when so many documents have their tokens."""
    seen = []

    def each(what):
        seen.append(what.startswith("preparing"))
        if sum(seen) > number:
            raise StoppedEarly("tokens", "a test")

    return each


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
def test_ranks_continue_where_one_rank_or_all_have_stopped(world, given):
    if world.rank == 0:
        tokenizer = load_tokenizer(given / "t.json")
        with pytest.raises(StoppedEarly):
            prepare(
                Corpus("jsonl", given / "a.jsonl"),
                tokenizer,
                given / "stopped",
                report=Reporter(stops_after(100)),
            )
    world.Barrier()
    with pytest.raises(StoppedEarly):
        tokenize(world, given, "stopped", stops_after(100))
    tokenize(world, given, "stopped")
    agree(world, files_of(given / "stopped") == files_of(given / "alone"))


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
def test_what_one_rank_cannot_encode_all_ranks_raise(world, given):
    if world.rank == 0:
        content = (given / "a.jsonl").read_text() + json.dumps({"text": "six"})
        (given / "b.jsonl").write_text(content)
    world.Barrier()
    found = ""
    try:
        tokenize(world, given, "none", text="b.jsonl")
    except DataError as error:
        found = error.args[0]
    agree(world, "cannot encode the text" in found, found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
def test_ranks_without_memory_for_a_tokenizer_do_not_help(world, given, monkeypatch):
    for memory, expected in (
        (0, 1),
        (2 * 1.5 * (600 * 160 + 20 * (given / "t.json").stat().st_size), 1),
        (None, world.size),
    ):
        monkeypatch.setattr(tokenizing, "available_bytes", lambda memory=memory: memory)
        shares = tokenize(world, given, f"of-{memory}")
        agree(world, shares == [expected] * (world.rank == 0), (shares, memory))
        agree(world, files_of(given / f"of-{memory}") == files_of(given / "alone"))


def piece(text, after, is_last=True):
    return DocumentPiece(Document("x", text, after), text, is_last)


def test_the_pace_is_reported_every_few_seconds():
    now = [100.0]
    said = []
    pace = Pace(said.append, [4_000_000, 6_000_000], Position(0, 1_000_000), "on 2 ranks", lambda: now[0])
    assert said == [
        "tokenizing: 10,000,000 bytes in 2 files, 1,000,000 of them before this start, on 2 ranks"
    ]
    pieces = [piece(b"", Position(0, 2_000_000)), piece(b"", Position(1))] * 2 + [
        piece(b"x" * 1000, None, False)
    ]
    for second, each in enumerate(pieces):
        now[0] = 101.5 + 1.5 * second
        pace.encoded(each)
    assert said[1:] == ["tokenizing: 4,000,000 of 10,000,000 bytes (40%), 0.50 MB/s, 0:00:12 left"]
    now[0] = 111.0
    pace.encoded(piece(b"x" * 1_998_000, None, False))
    assert said[2:] == ["tokenizing: 5,999,000 of 10,000,000 bytes (60%), 0.45 MB/s, 0:00:09 left"]

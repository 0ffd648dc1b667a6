"""Corpora as people have them: a line says what was read and what wasn't; ends were counted by hand.

Each case is read in this process, in milliseconds; some go through the whole program on several
ranks.
"""

import gzip
import json
import os
from typing import NamedTuple

import pytest
from conftest import LONG
from launch import MPITRAIN, mpirun, run_tiny, tail

from mpitrain.data.corpus import Corpus
from mpitrain.data.preparation import prepare
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.data.tokens import describe, open_ends
from mpitrain.errors import DataError

MARK = b"\xef\xbb\xbf"


class SymbolicLink(NamedTuple):
    """A symbolic link."""

    to: str


class OddCorpus(NamedTuple):
    """files: by path below the folder.  left_out: what the line says of it; or a part of the error.

    counts: files, documents, bytes, tokens.
    ends: of documents.
    path: within the folder; or several.
    """

    source: str
    files: dict
    counts: tuple[int, int, int, int] | None
    left_out: str
    ends: list[int]
    path: str | tuple[str, ...] = ""
    text_key: str = "text"
    tokenizer: str = "bytes"


def lines(*texts, key="text"):
    return "".join(json.dumps({key: text}) + "\n" for text in texts).encode()


def text(files, counts, left_out, ends, **others):
    return OddCorpus("text", files, counts, left_out, ends, **others)


def jsonl(files, counts, left_out, ends, **others):
    return OddCorpus("jsonl", files, counts, left_out, ends, **others)


COPY = "duplicates of an earlier file"
NO_LINES = "JSON that is no lines of JSON"
READ = {
    # ------------------------------------------------ links
    "a linked file, to one in the folder": text(
        {"a": b"one", "b": SymbolicLink("a")}, (1, 1, 3, 3), f"1 {COPY} (b)", [3]
    ),
    "a linked file, to one elsewhere": text(
        {"in/a": b"one", "out/b": b"three", "in/b": SymbolicLink("../out/b")},
        (2, 2, 8, 9),
        "nothing",
        [4, 9],
        path="in",
    ),
    "a linked folder": text(
        {"in/a": b"one", "out/b": b"three", "out/c": b"x", "in/more": SymbolicLink("../out")},
        *((3, 3, 9, 11), "nothing", [4, 6 + 4, 11]),
        path="in",
    ),
    "a folder linked twice": text(
        {"in/a": b"one", "out/b": b"three", "in/m": SymbolicLink("../out"), "in/n": SymbolicLink("../out")},
        *((2, 2, 8, 9), f"1 {COPY} (n)", [4, 9]),
        path="in",
    ),
    "a link that leads back": text(
        {"in/a": b"one", "in/sub/b": b"two", "in/sub/up": SymbolicLink("..")},
        *((2, 2, 6, 7), f"1 {COPY} (sub/up)", [4, 7]),
        path="in",
    ),
    "a chain of links": text(
        {"in/a": SymbolicLink("../b"), "b": SymbolicLink("c"), "c": b"one"},
        (1, 1, 3, 3),
        "nothing",
        [3],
        path="in",
    ),
    "only links": text(
        {"in/a": SymbolicLink("../x"), "in/b": SymbolicLink("../y"), "x": b"1", "y": b"22"},
        (2, 2, 3, 4),
        "nothing",
        [2, 4],
        path="in",
    ),
    "a copy": text({"a": b"same", "b": b"same", "c": b"else"}, (2, 2, 8, 9), f"1 {COPY} (b)", [5, 9]),
    # ------------------------------------------------ suffixes, names, places
    "suffixes in capitals": jsonl(
        {"a.JSONL": lines("a"), "b.Jsonl": lines("bb")}, (2, 2, 3, 4), "nothing", [2, 4]
    ),
    "other suffixes of lines": jsonl(
        {"a.ndjson": lines("a"), "b.jsonlines": lines("bb"), "c.NDJSON": lines("c")},
        (3, 3, 4, 6),
        "nothing",
        [2, 5, 6],
    ),
    "other kinds beside lines": jsonl(
        {"a.jsonl": lines("a"), "b.json": b"{}", "c.text.gz": b"x", "d.parquet": b"PAR1", "e.txt": b"text"},
        (1, 1, 1, 1),
        f"1 {NO_LINES} (b.json), 1 gzip (c.text.gz), 1 Parquet (d.parquet), 1 of another suffix (e.txt)",
        [1],
    ),
    "text of any suffix": text(
        {"a.TXT": b"a", "b": b"b", "c.md": b"c", "d.py": b"d"}, (4, 4, 4, 7), "nothing", [2, 4, 6, 7]
    ),
    "hidden files and folders": text(
        {"a": b"a", ".b": b"b", ".git/c": b"c"}, (1, 1, 1, 1), "2 hidden (.git)", [1]
    ),
    "names that are no ASCII": text({"ä b\n.txt": b"a", "模型": b"b"}, (2, 2, 2, 3), "nothing", [2, 3]),
    "a file named itself, of any suffix": jsonl(
        {"a.json": lines("a", "b")}, (1, 2, 2, 3), "nothing", [2, 3], path="a.json"
    ),
    "a pattern": text(
        {"x/a.txt": b"a", "x/b.md": b"b", "x/y/c.txt": b"c"},
        (2, 2, 2, 3),
        "nothing",
        [2, 3],
        path="x/**/*.txt",
    ),
    "a pattern that matches a folder, too": text(
        {"x/a.txt": b"a", "x/b.txt/c": b"c", "x/d.txt/e.txt": b"d"},
        *((2, 2, 2, 3), "1 folders that a pattern matches beside files (b.txt)", [2, 3]),
        path="x/**/*.txt",
    ),
    "a list of a file and a folder": text(
        {"a/1": b"one", "b/2": b"two", "c": b"x"}, (2, 2, 4, 5), "nothing", [2, 5], path=("c", "a")
    ),
    # ------------------------------------------------ marks, NULs, holes, line ends
    "byte order marks": text({"a": MARK + b"one", "b": MARK + b"two"}, (2, 2, 6, 7), "nothing", [4, 7]),
    "a mark within a text": text({"a": b"x" + MARK + b"y"}, (1, 1, 5, 5), "nothing", [5]),
    "a mark before lines of JSON": jsonl(
        {"a.jsonl": MARK + lines("one", "two")}, (1, 2, 6, 7), "nothing", [4, 7]
    ),
    "marks of concatenated files": jsonl(
        {"a.jsonl": MARK + lines("one") + MARK + lines("two")}, (1, 2, 6, 7), "nothing", [4, 7]
    ),
    "nothing but a mark": text({"a": MARK, "b": b"one"}, (2, 1, 3, 3), "1 without text (a)", [3]),
    "NULs": text({"a": b"a\0b", "b": b"\0"}, (2, 2, 4, 7), "nothing", [5, 7]),
    "a hole": text({"a": b"x" + bytes(300) + b"y"}, (1, 1, 302, 602), "nothing", [602]),
    "NUL in JSON": jsonl({"a.jsonl": lines("a\0b", "c")}, (1, 2, 4, 6), "nothing", [5, 6]),
    "other line ends": text({"a": b"a\r\nb\r\n", "b": b"a\rb"}, (2, 2, 9, 10), "nothing", [7, 10]),
    "no last line end, empty lines": jsonl(
        {"a.jsonl": b'\n\r\n{"text": "a"}\r\n\n  \n{"text": "b"}'}, (1, 2, 2, 3), "nothing", [2, 3]
    ),
    # ------------------------------------------------ empty, large, JSON as it is written
    "empty files": text({"a": b"", "b": b"one", "c": b""}, (1, 1, 3, 3), "2 empty (a)", [3]),
    "empty documents": jsonl(
        {"a.jsonl": lines("", "a", "", "")}, (1, 1, 1, 1), "3 without text (a.jsonl:1)", [1]
    ),
    "an empty file of lines": jsonl(
        {"a.jsonl": b"", "b.jsonl": lines("a")}, (1, 1, 1, 1), "1 empty (a.jsonl)", [1]
    ),
    "10,000 short documents": jsonl(
        {"a.jsonl": lines(*"x" * 10_000)},
        (1, 10_000, 10_000, 19_999),
        "nothing",
        [*range(2, 20_000, 2), 19_999],
    ),
    "a text of one line of 30 MB": text(
        {"a": b"0123456789" * 3_000_000}, (1, 1, 30_000_000, 30_000_000), "nothing", [30_000_000]
    ),
    "a document of 30 MB in JSON": jsonl(
        {"a.jsonl": lines("x" * 30_000_000, "y")},
        (1, 2, 30_000_001, 30_000_002),
        "nothing",
        [30_000_001, 30_000_002],
    ),
    "surrogates and NaN under other keys": jsonl(
        {"a.jsonl": b'{"text": "a", "x": "\\ud800", "y": NaN}\n{"y": Infinity, "text": "\\ud83d\\ude80"}'},
        *((1, 2, 5, 6), "nothing", [2, 6]),
    ),
    "another key": jsonl(
        {"a.jsonl": lines("a", "b", key="content")}, (1, 2, 2, 3), "nothing", [2, 3], text_key="content"
    ),
    "a key of several lines and keys twice": jsonl(
        {"a.jsonl": b'{"te\\u0078t": "a", "other": {"text": "no"}}'}, (1, 1, 1, 1), "nothing", [1]
    ),
    # ------------------------------------------------ encodings
    "binary files beside text": text(
        {
            "a.txt": b"one",
            "b.png": b"\x89PNG\r\n\x1a\n\0\0\xff",
            "c.gz": gzip.compress(b"x", mtime=0),
            "d.pdf": b"%PDF-1.4\n\xff",
        },
        (4, 1, 3, 3),
        "1 no text but binary (b.png), 1 no text but gzip (c.gz), 1 no text but PDF (d.pdf)",
        [3],
    ),
    "text of four scripts": text(
        {"a": "naïve".encode(), "b": "模型".encode(), "c": "عربي".encode()},
        (3, 3, 20, 22),
        "nothing",
        [7, 14, 22],
    ),
    # ------------------------------------------------ special tokens, spelled out
    "control tokens in a text": text(
        {"a": b"<s>one</s>", "b": b"</s>"}, (2, 2, 14, 15), "nothing", [11, 15], tokenizer="</s>"
    ),
    "one that looks like a control token": text(
        {"a": b"a </br> b", "b": b"c"}, (2, 2, 10, 11), "nothing", [10, 11], tokenizer="<eos>"
    ),
    "a model without an end of text": text(
        {"a": b"ab", "b": b"c"}, (2, 2, 3, 3), "nothing", [2, 3], tokenizer=""
    ),
}
REFUSED = {
    "UTF-16 and Latin-1 beside UTF-8": text(
        {"a": "one".encode("utf-16"), "b": "zwölf".encode("latin-1"), "c": b"fine"},
        *(
            None,
            r"2 files .*a is UTF-16, not UTF-8 text: convert it to UTF-8; .*b is not UTF-8 text \(byte 2\)",
            [],
        ),
    ),
    "one line of 100 MB": jsonl(
        {"a.jsonl": lines("x") + lines("x" * 100_000_000)}, None, "line 2 has more than 67,108,864 bytes", []
    ),
    "an array of objects": jsonl(
        {"a.json": b'[{"text": "a"}]'}, None, "a.json is one JSON array, not lines", [], path="a.json"
    ),
    "gzip that holds no JSON": jsonl(
        {"a.gz": gzip.compress(b"x")}, None, "a.gz, line 1: found invalid JSON", [], path="a.gz"
    ),
    "two damaged files": jsonl(
        {"a.jsonl": b"{\n", "b.jsonl": lines("b"), "c.jsonl": b'{"txt": "c"}'},
        *(
            None,
            r"2 files .*a\.jsonl, line 1: found invalid JSON.*; .*c\.jsonl, line 1: found .*text_key says",
            [],
        ),
    ),
    "half a character": jsonl(
        {"a.jsonl": b'{"text": "\\ud800"}'}, None, "line 1: found half of a character", []
    ),
    "nothing but what isn't read": jsonl(
        {"b.json": b"{}", ".c.jsonl": lines("c")}, None, rf"holds no text \(.*{NO_LINES}: b.json", []
    ),
    "nothing but empty files": text({"a": b"", "b": b""}, None, r"holds no text \(empty: a, b\)", []),
    "a broken link": text(
        {"a": b"one", "b": SymbolicLink("nowhere")}, None, "b cannot be read: No such file", []
    ),
    "a link to itself": text(
        {"a": b"one", "b": SymbolicLink("b")}, None, "b cannot be read: .*symbolic links", []
    ),
}


def laid(folder, files):
    """Write the files of a case."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, SymbolicLink):
            path.symlink_to(content.to)
        else:
            path.write_bytes(content)
    return folder


def tokenizer_of(case, folder):
    """Return bytes, or a tokenizer of letters whose end of text is named by the case."""
    if case.tokenizer == "bytes":
        return load_tokenizer("bytes")
    return load_tokenizer(letters(folder / "t.json", case.tokenizer))


def letters(file, end):
    """Write a tokenizer of characters with <s>, </br> (which isn't special) and an end of text."""
    from tokenizers import AddedToken, Tokenizer, models

    model = Tokenizer(models.BPE({chr(c): c - 32 for c in range(32, 127)}, []))
    model.add_special_tokens(["<s>", *([end] if end else [])])
    model.add_tokens([AddedToken("</tag>", special=False)])
    model.save(str(file))
    return file


def paths_of(case, corpus):
    return (
        str(corpus / case.path) if isinstance(case.path, str) else [str(corpus / each) for each in case.path]
    )


def read(case, tmp_path):
    corpus = laid(tmp_path / "corpus", case.files)
    read = Corpus(case.source, paths_of(case, corpus), text_key=case.text_key)
    prepare(read, tokenizer_of(case, tmp_path), tmp_path / "data")
    return describe(tmp_path / "data")


def line_of(case):
    files, documents, size, tokens = case.counts
    numbers = dict(files=files, documents=documents, bytes=size, tokens=tokens)
    read = ", ".join(f"{number:,} {name[: -1 if number == 1 else None]}" for name, number in numbers.items())
    return f"{read}; left out: {case.left_out}"


@pytest.mark.parametrize("name", READ)
def test_the_line_and_the_ends_are_those_counted_by_hand(tmp_path, name):
    case = READ[name]
    found = read(case, tmp_path)
    expected = line_of(case)
    assert found.tally.describe(found.count) == expected
    assert open_ends(tmp_path / "data").tolist() == case.ends


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(tmp_path, name):
    with pytest.raises(DataError, match=REFUSED[name].left_out):
        read(REFUSED[name], tmp_path)
    assert not (tmp_path / "data").exists() or os.listdir(tmp_path / "data") == []


def test_there_are_as_many_cases_as_were_asked_for():
    assert len(READ) + len(REFUSED) >= 40


# ---------------------------------------------------------------- through the whole program


def reported_in(done, case):
    return done.output.splitlines().count(f"text: {line_of(case)}") == 1


SHORT = dict(run_steps=2, run_eval_every=1, run_eval_batches=1, data_val_fraction=0.3)
WHOLE = {
    "links, suffixes and copies in lines of JSON": (
        jsonl(
            {
                "in/a.jsonl": lines("x" * 500, "", "y" * 500),
                "in/b.JSONL": lines("z" * 500),
                "in/c.json": b"{}",
                "in/copy.jsonl": lines("z" * 500),
                "in/d.text.gz": b"\x1f\x8b",
                "in/more": SymbolicLink("../out"),
                "out/e.ndjson": lines("w" * 500),
            },
            (3, 4, 2000, 2003),
            f"1 without text (a.jsonl:2), 1 {NO_LINES} (c.json), 1 gzip (d.text.gz), 1 {COPY} (copy.jsonl)",
            [501, 1002, 1503, 2003],
            path="in",
        ),
        {},
    ),
    "marks, NULs, holes and binary files": (
        text(
            {
                "a": MARK + b"x" * 400,
                "b": b"y" * 200 + bytes(300),
                "c": b"",
                "d": b"\x89PNG\0\xff",
                "e": b"w" * 400,
            },
            (4, 3, 1300, 1602),
            "1 no text but binary (d), 1 empty (c)",
            [401, 1202, 1602],
        ),
        dict(data_documents="separate"),
    ),
    "control tokens in a text": (
        text(
            {"a": b"<s>one</s>" * 50, "b": b"</s>" * 100, "c": b"</tag>" * 100},
            (3, 3, 1500, 1002),
            "nothing",
            [501, 902, 1002],
            tokenizer="</s>",
        ),
        dict(data_documents="separate"),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[LONG] * (number > 0)) for number, name in enumerate(WHOLE)]
)
def test_a_run_says_it_in_one_line(tmp_path, name):
    case, more = WHOLE[name]
    corpus = laid(tmp_path / "corpus", case.files)
    if case.tokenizer != "bytes":
        more = more | dict(data_tokenizer=letters(tmp_path / "t.json", case.tokenizer))
    done = run_tiny(2, tmp_path / "run", corpus / case.path, data_source=case.source, **SHORT, **more)
    assert done.returncode == 0 and reported_in(done, case), tail(done.output)
    assert open_ends(tmp_path / "run" / "data").tolist() == case.ends
    assert [line.partition(" ")[0] for line in done.output.splitlines()][:3] == [
        "tokenizing:",
        "text:",
        "tokens:",
    ]


def test_a_corpus_is_moved_and_then_removed(tmp_path):
    case = text({"a": b"x" * 800, "b": b"y" * 400}, (2, 2, 1200, 1201), "nothing", [801, 1201])
    corpus = laid(tmp_path / "corpus", case.files)
    done = run_tiny(2, tmp_path / "run", corpus, **SHORT)
    assert done.returncode == 0 and reported_in(done, case), tail(done.output)
    corpus.rename(tmp_path / "moved")
    done = run_tiny(2, tmp_path / "run", tmp_path / "moved", **SHORT | dict(run_steps=3))
    assert done.returncode == 0, tail(done.output)
    assert reported_in(done, case), tail(done.output)
    assert "resuming after step 2" in done.output, tail(done.output)
    done = run_tiny(2, tmp_path / "run", tmp_path / "gone", **SHORT | dict(run_steps=4))
    assert done.returncode == 0, tail(done.output)
    assert reported_in(done, case), tail(done.output)
    assert "gone cannot be read" in done.output, tail(done.output)


def test_everything_that_is_damaged_is_named_in_one_message(tmp_path):
    case = REFUSED["UTF-16 and Latin-1 beside UTF-8"]
    corpus = laid(tmp_path / "corpus", case.files)
    settings = ("data.source=text", f"data.path={corpus}", f"run.dir={tmp_path}/run")
    done = mpirun(2, MPITRAIN, "run", *(word for setting in settings for word in ("--set", setting)))
    said = [line for line in done.output.splitlines() if not line.startswith("tokenizing: ")]
    assert done.returncode == 2, tail(done.output)
    assert len(said) == 1, tail(done.output)
    assert "2 files can't be read: " in said[0], tail(done.output)
    assert not (tmp_path / "run").exists()

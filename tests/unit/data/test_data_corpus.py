"""The documents of each source, and a message for everything that can be wrong with them."""

import json
import os

import pytest

from mpitrain.data.corpus import Corpus, documents
from mpitrain.data.corpus_files import check_source, list_unique, with_validation
from mpitrain.data.source import SOURCES
from mpitrain.errors import ConfigError, DataError


def read(source, path=None):
    check_source(source, path)
    return [(found.name, found.text) for found in documents(Corpus(source, path))]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_stdlib_is_deterministic_and_has_a_useful_size():
    first = read("python-stdlib")
    second = read("python-stdlib")
    names = [name for name, _ in first]
    assert first == second
    assert names == sorted(names)
    assert 5e6 < sum(len(text) for _, text in first) < 15e6
    assert {"json/decoder.py", "ast.py"} <= set(names)


def test_stdlib_leaves_out_tests_and_what_differs_between_machines():
    parts = {part for name, *_ in documents(Corpus("python-stdlib")) for part in name.split("/")}
    assert not parts & {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "sitecustomize.py",
    }
    assert not any(part.startswith("_sysconfigdata") for part in parts)


def test_text_file_is_one_document(tmp_path):
    path = write(tmp_path / "a.txt", "naïve 模型 🚀\n")
    assert read("text", str(path)) == [("a.txt", "naïve 模型 🚀\n".encode())]


def test_text_folder_is_read_recursively_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/é.md", "empty.txt", ".hidden", ".git/config"):
        write(tmp_path / name, "" if name == "empty.txt" else name)
    assert [name for name, _ in read("text", tmp_path)] == ["a/z.txt", "a/é.md", "b.txt"]


def test_text_that_is_not_utf8_is_refused_by_name(tmp_path):
    write(tmp_path / "good.txt", "good")
    write(tmp_path / "latin1.txt", "café".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin1\.txt is not UTF-8 text \(byte 3\)"):
        read("text", tmp_path)


def test_jsonl_gives_the_text_of_each_line(tmp_path):
    lines = [
        json.dumps({"text": "eins", "meta": {"n": [1]}}),
        "",
        '{"text": "\\u00e9\\ud83d\\ude80"}',
        '{"text": ""}',
    ]
    path = write(tmp_path / "a.jsonl", "\ufeff" + "\r\n".join(lines))
    assert read("jsonl", path) == [("a.jsonl:1", b"eins"), ("a.jsonl:3", "é🚀".encode())]


def test_jsonl_folder_reads_only_jsonl(tmp_path):
    for name in ("2.jsonl", "1/x.jsonl", "README.md"):
        write(tmp_path / name, json.dumps({"text": name}))
    assert [text for _, text in read("jsonl", tmp_path)] == [b"1/x.jsonl", b"2.jsonl"]


@pytest.mark.parametrize(
    "line",
    [
        b'{"text": "cut',
        b'{"txt": "a"}',
        b'{"text": 7}',
        b'{"text": null}',
        b'["a"]',
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b"plain",
    ],
)
def test_jsonl_error_names_file_and_line(tmp_path, line):
    path = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 3: .*under the key \"text\""):
        read("jsonl", path)


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_missing_path_is_named(tmp_path, source):
    for path in (tmp_path / "nowhere", write(tmp_path / "file", "x") / "below"):
        with pytest.raises(DataError, match=rf"data\.path: {path} cannot be read: .*change data\.path"):
            check_source(source, path)


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_empty_file_or_folder_holds_no_text(tmp_path, source):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", write(tmp_path / "empty.jsonl", "")):
        with pytest.raises(DataError, match=rf'data\.path = "{path}" holds no text'):
            check_source(source, path)
        with pytest.raises(DataError, match="holds no text"):
            list(documents(Corpus(source, path)))


def test_jsonl_of_empty_texts_holds_no_text(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": ""}\n')
    with pytest.raises(DataError, match="holds no text"):
        read("jsonl", path)


def test_folder_without_jsonl_says_what_is_needed(tmp_path):
    write(tmp_path / "a.txt", "text")
    with pytest.raises(DataError, match=r"put a \.jsonl file"):
        check_source("jsonl", tmp_path)


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"data\.source = 'wiki'; known: auto, chat, datatrove, jsonl, megatron"
    ):
        check_source("wiki", None)
    with pytest.raises(DataError, match=r"needs data\.path"):
        check_source("text", "")
    with pytest.raises(DataError, match=r'use data\.source = "text"'):
        check_source("python-stdlib", "my.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        check_source("text", tmp_path / "pipe")


def test_broken_link_is_named(tmp_path):
    write(tmp_path / "a.txt", "text")
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"link\.txt cannot be read"):
        check_source("text", tmp_path)


def test_file_without_permission_is_named(tmp_path, monkeypatch):
    # root may read everything: chmod would prove nothing
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DataError, match=r"a\.txt cannot be read: permission denied"):
        check_source("text", write(tmp_path / "a.txt", "text"))


# ---------------------------------------------------------------- text as people have it


def texts(path, key="text"):
    return [found.text.decode() for found in documents(Corpus("jsonl", path, text_key=key))]


GOOD = {
    "half of a character in a key that nobody reads": '{"text": "ok", "title": "\\ud83d"}',
    "NaN beside": json.dumps({"text": "ok", "score": float("nan")}),
    "an infinite number beside": json.dumps({"score": float("-inf"), "text": "ok"}),
    "a large number beside": '{"text": "ok", "id": ' + "9" * 6000 + "}",
    "the key twice": '{"text": "no", "text": "ok"}',
    "a mark in front of the text": '{"text": "\ufeffok"}',
    "another spelling of the key": '{"te\\u0078t": "ok", "x": NaN}',
}


@pytest.mark.parametrize("case", GOOD)
def test_what_nobody_reads_of_a_line_makes_no_difference(tmp_path, case):
    assert texts(write(tmp_path / "a.jsonl", GOOD[case])) == ["ok"]


WRONG = {
    '[{"text": "a"}]': "an array, not an object",
    '"a"': "a string, not an object",
    '{"content": "a", "id": 1}': r'an object without "text", but content, id: data\.text_key says which',
    "{}": 'an object without "text";',
    '{"text": null}': 'null under the key "text"',
    '{"text": 5}': 'a number under the key "text"',
    '{"text": ["a"]}': 'an array under the key "text"',
    '{"text": "\\ud83d end"}': r'half of a character that JSON writes as two \(.ud83d\) under the key "text"',
    '{"text": "cut': r"invalid JSON \(Unterminated string starting at, character 9\)",
    '{"text": "a"}\r{"text": "b"}': r"invalid JSON \(Extra data",
}


@pytest.mark.parametrize("line", WRONG)
def test_what_a_line_has_instead_is_said(tmp_path, line):
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: found " + WRONG[line]):
        texts(write(tmp_path / "a.jsonl", '{"text": "first"}\n' + line))


def test_a_compressed_file_is_called_so(tmp_path):
    with pytest.raises(DataError, match=r"a\.gz is gzip, not UTF-8 text: unpack it"):
        read("text", write(tmp_path / "a.gz", b"\x1f\x8b\x08\0\xff"))
    for source, needed in (("jsonl", "not lines of JSON"), ("text", "not UTF-8 text")):
        with pytest.raises(DataError, match=f"a.txt is UTF-16, {needed}: convert it"):
            read(source, write(tmp_path / "a.txt", "text".encode("utf-16")))


def test_the_key_of_the_text_can_be_named(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"content": "a", "text": 3}\n{"content": "b", "x": NaN}\n')
    assert texts(path, "content") == ["a", "b"]
    with pytest.raises(
        DataError, match=r'without "no.such", but content, text.*under the key "no.such" \(data.text_key\)'
    ):
        texts(path, "no.such")


def test_all_damaged_files_are_named_at_once(tmp_path):
    for number in range(12):
        write(tmp_path / f"{number:02}.txt", b"caf\xe9 %d" % number if number % 4 else b"good %d" % number)
    with pytest.raises(
        DataError, match=r"9 files can't be read: .*01.txt is not UTF-8 text.*10.txt.* and 1 more; convert"
    ) as caught:
        read("text", tmp_path)
    assert "00.txt" not in str(caught.value)
    (tmp_path / "13.txt").symlink_to("gone")
    (tmp_path / "14.txt").symlink_to("gone")
    with pytest.raises(
        DataError,
        match=r"2 files can't be read: .*13.txt cannot be read: No such file.*14.txt cannot be read",
    ):
        check_source("text", tmp_path)


def test_damaged_lines_are_counted_and_the_first_of_each_file_named(tmp_path):
    write(tmp_path / "a.jsonl", '{"text": "a"}\n{\n[]\n3\n')
    write(tmp_path / "b.jsonl", '{"text": "b"}\n')
    write(tmp_path / "c.jsonl", "null")
    with pytest.raises(
        DataError,
        match=r"a.jsonl, line 2: found invalid JSON .* \(and 2 more lines\); .*c.jsonl, line 1: found null",
    ):
        read("jsonl", tmp_path)


def test_several_paths_and_patterns_are_read_in_their_order(tmp_path):
    for name in ("x/a.txt", "x/b.md", "x/y/c.txt", "z/d.txt", "z/picture.dat"):
        write(tmp_path / name, name)
    names = [name for name, _ in read("text", (str(tmp_path / "z"), str(tmp_path / "x" / "**" / "*.txt")))]
    assert names == ["z/d.txt", "z/picture.dat", "a.txt", "c.txt"]
    assert [name for name, _ in read("text", str(tmp_path / "*" / "?.txt"))] == ["a.txt", "d.txt"]
    with pytest.raises(DataError, match=r"\*.jsonl\" matches nothing"):
        read("text", str(tmp_path / "*.jsonl"))
    write(tmp_path / "[1].txt", "a name like a pattern")
    assert [name for name, _ in read("text", str(tmp_path / "[1].txt"))] == ["[1].txt"]


def test_a_named_file_is_read_whatever_its_suffix(tmp_path):
    write(tmp_path / "a.json", '{"text": "a"}\n')
    with pytest.raises(
        DataError, match=r"holds no text \(JSON that is no lines of JSON: a.json\); put a .jsonl"
    ):
        read("jsonl", tmp_path)
    assert (
        read("jsonl", tmp_path / "a.json") == read("jsonl", str(tmp_path / "*.json")) == [("a.json:1", b"a")]
    )


@pytest.mark.parametrize("text", ['[{"text": "a"}, {"text": "b"}]', '[\n  {"text": "a"}\n]\n', "\ufeff [ {"])
def test_an_array_of_objects_is_named_as_one(tmp_path, text):
    write(tmp_path / "a.json", text)
    with pytest.raises(
        DataError, match=r"a\.json is one JSON array, not lines of JSON: write its objects one a line, as jq"
    ):
        read("jsonl", tmp_path / "a.json")


@pytest.mark.parametrize(
    ("source", "path", "expected"),
    [
        ("python-stdlib", "x", 'data.val_path = "x" has no use with data.source = "python-stdlib"'),
        ("text", "absent/*.txt", 'data.val_path = "absent/*.txt" matches nothing'),
        ("text", "/dev/null", 'data.val_path = "/dev/null" is neither a file nor a folder'),
        ("jsonl", ".", 'data.val_path = "." holds no text'),
        ("text", "empty.txt", 'data.val_path = "empty.txt" holds no text'),
    ],
)
def test_messages_name_the_key_that_is_wrong(tmp_path, monkeypatch, source, path, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError) as error:
        check_source(source, path, "data.val_path")
    assert error.value.args[0].startswith(expected)


def test_a_text_to_train_on_that_is_all_validated_with_says_so(tmp_path):
    for name in ("a.txt", "b.txt"):
        write(tmp_path / name, "some words")
    both = [list_unique(SOURCES.find("text"), str(tmp_path / name)) for name in ("a.txt", "b.txt")]
    with pytest.raises(DataError, match=r"nothing is left to train on: a\.txt is also in data\.val_path"):
        with_validation(*both)

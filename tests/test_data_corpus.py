"""The documents of each source, and a message for everything that can be wrong with them."""

import json
import os

import pytest

from mpitrain.data.corpus import check_source, documents
from mpitrain.errors import DataError


def read(source, path=None):
    check_source(source, path)
    return list(documents(source, path))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_stdlib_is_deterministic_and_has_a_useful_size():
    first, second = read("python-stdlib"), read("python-stdlib")
    names = [name for name, _ in first]
    assert first == second
    assert names == sorted(names)
    assert 5e6 < sum(len(text) for _, text in first) < 15e6
    assert {"json/decoder.py", "ast.py"} <= set(names)


def test_stdlib_leaves_out_tests_and_what_differs_between_machines():
    parts = {part for name, _ in documents("python-stdlib", None) for part in name.split("/")}
    assert not parts & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "sitecustomize.py"}
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
    lines = [json.dumps({"text": "eins", "meta": {"n": [1]}}), "", '{"text": "\\u00e9\\ud83d\\ude80"}', '{"text": ""}']
    path = write(tmp_path / "a.jsonl", "\ufeff" + "\r\n".join(lines))
    assert read("jsonl", path) == [("a.jsonl:1", b"eins"), ("a.jsonl:3", "é🚀".encode())]


def test_jsonl_folder_reads_only_jsonl(tmp_path):
    for name in ("2.jsonl", "1/x.jsonl", "README.md"):
        write(tmp_path / name, json.dumps({"text": name}))
    assert [text for _, text in read("jsonl", tmp_path)] == [b"1/x.jsonl", b"2.jsonl"]


@pytest.mark.parametrize(
    "line",
    [b'{"text": "cut', b'{"txt": "a"}', b'{"text": 7}', b'{"text": null}', b'["a"]', b'{"text": "\\ud800"}', b'{"text": "\xff"}', b"plain"],
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
            list(documents(source, path))


def test_jsonl_of_empty_texts_holds_no_text(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": ""}\n')
    with pytest.raises(DataError, match="holds no text"):
        read("jsonl", path)


def test_folder_without_jsonl_says_what_is_needed(tmp_path):
    write(tmp_path / "a.txt", "text")
    with pytest.raises(DataError, match=r"put a \.jsonl file"):
        check_source("jsonl", tmp_path)


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(DataError, match="python-stdlib, text, jsonl"):
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
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything: chmod would prove nothing
    with pytest.raises(DataError, match=r"a\.txt cannot be read: permission denied"):
        check_source("text", write(tmp_path / "a.txt", "text"))

"""Texts of another format: said by their beginning, or by their name."""

import pytest

from mpitrain.data.file_kinds import markup_of
from mpitrain.data.origin import ReadCounts
from mpitrain.data.source import File, Position
from mpitrain.data.sources import text

HTML = b"\n<!DOCTYPE HTML>\n<p>a"


@pytest.mark.parametrize(
    ("name", "content", "markup"),
    [
        ("a.txt", b"plain words", ""),
        ("a.py", b"{1: 2}", ""),
        ("a.txt", b"{not json", ""),
        ("a.txt", b"a < b", ""),
        ("a", HTML, "HTML"),
        ("a.txt", b"<html lang=en>", "HTML"),
        ("a.htm", b"<p>no head", "HTML"),
        ("a.txt", b'{"text": "a"}\n{"text": "b"}\n', "JSON"),
        ("a.txt", b'[{"text": "a"}]', "JSON"),
        ("a.jsonl", b"", "JSON"),
        ("a.csv", b"a,b", "CSV"),
        ("a.txt", b"<?xml version='1.0'?>", "XML"),
    ],
)
def test_the_format_of_a_text(name, content, markup):
    assert markup_of(name, content) == markup


def test_documents_of_another_format_are_counted_and_named(tmp_path):
    tally = ReadCounts(files=3)
    for name, content in {"page": HTML, "b.jsonl": b'{"text": "a"}', "c.txt": b"words"}.items():
        (tmp_path / name).write_bytes(content)
        (document,) = text.read(File(name, tmp_path / name), Position(0), "")
        tally = tally.with_document(len(content), 0)
        tally = tally.with_named("marked", document.markup, [name]) if document.markup else tally
    named = tally.describe(10)
    assert "read as plain text: 1 HTML (page), 1 JSON (b.jsonl), marks and all; data.source = " in named
    assert "plain text" not in ReadCounts(files=1).describe(10)

"""What a file is that is no UTF-8 text, by its first bytes; and what a text is besides its words."""

import codecs
import re
from pathlib import PurePath

HEAD_BYTES = 8192
UTF_16 = "UTF-16"
MAGIC = {  # what a file begins with
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\x93NUMPY": "NumPy",
    b"\x89HDF": "HDF5",
    b"%PDF": "PDF",
    b"\xff\xfe": UTF_16,
    b"\xfe\xff": UTF_16,
}
TEXT_AFTER_ALL = {UTF_16: "convert it to UTF-8"} | dict.fromkeys(
    ("gzip", "zstd", "bzip2", "xz", "zip"), "unpack it"
)

LONGEST_BEGIN = 256
MARKUP = {  # by what a text begins with, in lower case
    re.compile(rb"<!doctype html|<html\b|<head\b|<body\b"): "HTML",
    re.compile(rb"<\?xml\b"): "XML",
    re.compile(rb'\{\s*"[^"]*"\s*:'): "JSON",
    re.compile(rb"\[\s*\{\s*\""): "JSON",
}
SUFFIXES = {
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "JSON"),
    **dict.fromkeys((".html", ".htm", ".xhtml"), "HTML"),
    **dict.fromkeys((".csv", ".tsv"), "CSV"),
    ".xml": "XML",
}


def kind_of(head: bytes) -> str:
    """Return what a file is that is no UTF-8 text; "" if that isn't known."""
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            return kind
    return "binary" if b"\0" in head and not _is_utf8(head) else ""


def markup_of(name: str, head: bytes) -> str:
    """Return the format of a text that has more than its words, by its beginning or its name; "" if none."""
    begin = head.lstrip()[:LONGEST_BEGIN].lower()
    for pattern, markup in MARKUP.items():
        if pattern.match(begin):
            return markup
    return SUFFIXES.get(PurePath(name).suffix.lower(), "")


def with_advice(found: str, kind: str) -> str:
    """Return a message with what to do about a kind of file that holds text after all."""
    return f"{found}: {TEXT_AFTER_ALL[kind]}" if kind in TEXT_AFTER_ALL else found


def _is_utf8(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True

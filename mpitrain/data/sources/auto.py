"""Files of any format, each recognised by its first bytes. A suffix decides only where they say nothing."""

import json
from collections.abc import Sequence
from pathlib import Path

from mpitrain.data.compressed import unpacked
from mpitrain.data.file_kinds import HEAD_BYTES
from mpitrain.data.source import File, Source, is_hidden
from mpitrain.data.sources import datatrove, jsonl, megatron, nanogpt, numpy_array, parquet, text
from mpitrain.data.token_files import MOST_BYTES
from mpitrain.inputs import open_file

# Parquet, a file of Arrow, and a stream of it, as the datasets library writes
TABLES = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
DESCRIPTIONS = ("dataset_info.json", parquet.STATE, parquet.SPLITS)


def choose(file: File) -> Source:
    """Return the source of a file. Raises Damaged, OSError."""
    with open(open_file(file.path, MOST_BYTES), "rb") as opened:
        head = opened.read(HEAD_BYTES)
        opened.seek(0)
        lines = unpacked(opened, file.path)
        is_lines = _is_object(head if lines is opened else lines.read(HEAD_BYTES))
    if head.startswith(TABLES):
        return parquet.PARQUET
    if head.startswith(numpy_array.MAGIC):
        return numpy_array.NUMPY_ARRAY
    if file.path.suffix == megatron.BIN and megatron.index_of(file.path).exists():
        return megatron.MEGATRON
    if is_lines or lines is not opened:
        return jsonl.JSONL
    if nanogpt.is_llm_c(head):
        return nanogpt.NANOGPT
    by_suffix = (nanogpt.NANOGPT, numpy_array.NUMPY_ARRAY, datatrove.DATATROVE)
    return next((source for source in by_suffix if file.path.suffix in source.suffixes), text.TEXT)


def _is_object(head: bytes) -> bool:
    """Return whether a text begins with a line that is a JSON object, whole or cut."""
    line, ended, _ = head.lstrip().partition(b"\n")
    if not line.startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return not ended and line[1:].lstrip().startswith(b'"')


def companions(path: Path) -> Sequence[Path]:
    sources = (megatron.MEGATRON, datatrove.DATATROVE, numpy_array.NUMPY_ARRAY, nanogpt.NANOGPT)
    return [found for source in sources for found in source.companions(path)]


def excludes(name: str) -> bool:
    return is_hidden(name) or name in DESCRIPTIONS


AUTO = Source(
    "auto",
    excludes=excludes,
    wanted="files of a corpus",
    advice="data.source says the format, if its first bytes don't; data.text_key the key or column",
    keyed=True,
    choose=choose,
    companions=companions,
    main=megatron.main,
    files_in=parquet.files_in,
)

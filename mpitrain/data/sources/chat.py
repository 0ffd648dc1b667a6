"""Conversations to answer as lines of JSON, each a document whose answers alone carry loss."""

from collections.abc import Iterator
from typing import Any

from mpitrain.data.conversations import Answered, Conversations
from mpitrain.data.limited import grouped
from mpitrain.data.source import Document, File, Position, Source
from mpitrain.data.sources import jsonl
from mpitrain.inputs import shown

AT_ONCE = 1000  # conversations that one child writes: to start it takes as long as 100 of them
AT_ONCE_BYTES = 1 << 24


def converse(file: File, begin: Position, conversations: Conversations) -> Iterator[Document]:
    """Yield a document for each line that is not blank; a damaged one says what is wrong with it."""
    lines = jsonl.lines_of(file, begin)
    for some in grouped(lines, lambda line: len(line[0]), AT_ONCE_BYTES, AT_ONCE):
        made = conversations.tokens([_read(line) for line, _ in some])
        for (_, after), found in zip(some, made, strict=True):
            yield _document(file, after, found)


def _read(line: bytes) -> Any:
    try:
        return jsonl.loaded(line)
    except ValueError as error:
        return error


def _document(file: File, after: Position, found: Answered | str) -> Document:
    name = f"{file.name}:{after.lines}"
    if isinstance(found, str):
        damage = f"{shown(file.path)}, line {after.lines}: found {found}"
        return Document(name, b"", after, damage=damage)
    return Document(name, b"", after, ids=found.ids, scored=found.scored, complete=True)


CHAT = Source(
    "chat",
    suffixes=jsonl.JSONL.suffixes,
    most_bytes=jsonl.JSONL.most_bytes,
    wanted="a .jsonl file with conversations",
    advice='every line must be an object with "messages", or with "prompt" and "completion"',
    converse=converse,
)

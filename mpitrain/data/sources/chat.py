"""Conversations to answer as lines of JSON, each a document whose answers alone carry loss."""

from collections.abc import Iterator
from typing import Any

from mpitrain.data.conversations import Answered, Conversations
from mpitrain.data.source import Document, File, Position, Source
from mpitrain.data.sources import jsonl
from mpitrain.inputs import shown

AT_ONCE = 1000  # conversations that one child writes: to start it takes as long as 100 of them
AT_ONCE_BYTES = 1 << 24
Line = tuple[bytes, Position]


def converse(file: File, begin: Position, conversations: Conversations) -> Iterator[Document]:
    """Yield a document for each line that is not blank; a damaged one says what is wrong with it."""
    for some in _groups(jsonl.lines_of(file, begin)):
        read = [_read(line) for line, _ in some]
        made = conversations.tokens([line for line, problem in read if not problem])
        for (_, after), (_, problem) in zip(some, read, strict=True):
            yield _document(file, after, problem or next(made))


def _groups(lines: Iterator[Line]) -> Iterator[list[Line]]:
    """Yield lines in groups for a child each."""
    group, size = list[Line](), 0
    for line in lines:
        group.append(line)
        size += len(line[0])
        if len(group) == AT_ONCE or size > AT_ONCE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _read(line: bytes) -> tuple[Any, str]:
    try:
        return jsonl.loaded(line), ""
    except ValueError as error:
        return None, error.args[0]


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

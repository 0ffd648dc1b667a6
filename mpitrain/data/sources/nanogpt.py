"""Ids in .bin files of nanoGPT (16-bit, no header) and of llm.c, whose header says type and number."""

import struct
from collections.abc import Sequence
from pathlib import Path

from mpitrain.data.source import Damaged, File, Source, TokenFile, TokenRule
from mpitrain.data.sources.numpy_array import require_type
from mpitrain.data.token_files import LOSS, TYPES, StoredArray, head_of, mask_of, type_of_ids, with_ending
from mpitrain.inputs import shown

HEADER_BYTES = 1024
HEADS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # llm.c: magic, version
EXAMPLES = 20240522  # llm.c's files of questions and answers
BIN = ".bin"


def companions(path: Path) -> Sequence[Path]:
    return [with_ending(path, LOSS)] if path.suffix == BIN else []


def header_of(head: bytes) -> tuple[int, int, int]:
    """Return the magic number, version and count that a header of llm.c would have."""
    return struct.unpack("<3I", head[:12]) if len(head) >= 12 else (0, 0, 0)


def is_llm_c(head: bytes) -> bool:
    """Return whether a file begins as one of llm.c."""
    return header_of(head)[0] in (EXAMPLES, *(known for known, _ in HEADS))


def tokens(file: File, rule: TokenRule) -> TokenFile:
    """Return the ids. Raises Damaged for a header that isn't right."""
    head = head_of(file.path, HEADER_BYTES)
    if not is_llm_c(head):
        ids = StoredArray(file.path, type_of_ids(rule, "uint16"))
        require_type(ids)
    else:
        magic, version, count = header_of(head)
        if (magic, version) not in HEADS:
            kind = "examples of llm.c's evaluation" if magic == EXAMPLES else "of an unknown version"
            raise Damaged(f"{shown(file.path)} is {kind} (magic number {magic}, version {version})")
        ids = StoredArray(file.path, TYPES[HEADS[magic, version]], HEADER_BYTES, count)
    return TokenFile(ids, scored=mask_of(file.path, ids.count))


NANOGPT = Source(
    "nanogpt",
    suffixes=(BIN,),
    wanted="a .bin file of ids",
    advice="write the file again, or leave it out of data.path",
    tokens=tokens,
    companions=companions,
)

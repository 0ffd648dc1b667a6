"""The tokens of a run on disk: one rank writes them once, every rank maps the file.

    tokens.bin     all ids, little-endian, nothing else
    tokens.json    Description: written last, so tokens without it are not finished
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from mpitrain.data.corpus import documents
from mpitrain.data.files import fingerprint
from mpitrain.data.tokenizer import Tokenizer, dtype_for
from mpitrain.errors import DataError
from mpitrain.inputs import kind_of, open_regular, read_regular, replacing, shown

TOKENS, DESCRIPTION = "tokens.bin", "tokens.json"
MOST_BYTES = 1 << 16  # of a description, which has 400
BLOCK_BYTES = 1 << 20

Count = Annotated[int, Meta(ge=1, le=2**62)]


class Origin(msgspec.Struct, frozen=True):
    """What the tokens were made from. Equal origins give equal tokens."""

    source: str
    path: str
    files: str  # fingerprint of the corpus
    tokenizer: str  # Tokenizer.identity
    vocab: Count


class Description(msgspec.Struct, frozen=True):
    origin: Origin
    count: Count
    dtype: str
    digest: str  # xxh3-128 of the bytes of tokens.bin


def prepare(
    source: str,
    path: str | Path | None,
    tokenizer: Tokenizer,
    folder: str | Path,
    accept: Callable[[Description, np.ndarray], object] = lambda description, tokens: None,
    each: Callable[[str], object] = lambda document: None,
) -> None:
    """Write the tokens of a corpus into `folder`, unless the very same ones are there already.

    For one rank only. A killed process leaves either the finished tokens or none: files get their names when they are synced.
    accept: raises what keeps these tokens from being used, before any others are replaced.  each: called with each document's name.
    """
    folder = Path(folder)
    _require_own(folder)
    origin = Origin(source, str(path or ""), fingerprint(source, path), tokenizer.identity, tokenizer.vocab)
    if _is_prepared(folder, origin):
        accept(describe(folder), open_tokens(folder))
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / TOKENS) as file:
            description = _write(file, documents(source, path), tokenizer, origin, each)
            file.flush()
            accept(description, np.memmap(file.name, description.dtype, mode="r"))
            (folder / DESCRIPTION).unlink(missing_ok=True)  # an old description never stands beside new tokens
        with replacing(folder / DESCRIPTION) as file:
            file.write(msgspec.json.format(msgspec.json.encode(description), indent=2) + b"\n")
    except OSError as error:
        raise DataError(f"{folder}: tokens cannot be written: {error.strerror}; change run.dir or free some space") from error


def describe(folder: str | Path) -> Description:
    """Return the description of prepared tokens; its digest tells whether two runs train on the same data."""
    file = Path(folder) / DESCRIPTION
    _require_own(file.parent)
    try:
        description = msgspec.json.decode(read_regular(file, MOST_BYTES), type=Description)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; prepare the tokens first") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DataError(f"{file} is damaged: {shown(error)}; remove it and start again") from error
    if description.dtype != (needed := dtype_for(description.origin.vocab).str):
        found = f"dtype {shown(repr(description.dtype))} for {description.origin.vocab} tokens"
        raise DataError(f"{file} is damaged: {found}, needed {needed!r}; remove it and start again")
    return description


def open_tokens(folder: str | Path) -> np.memmap:
    """Map the prepared tokens, read-only: [tokens], in the smallest dtype that holds the vocabulary."""
    description = describe(folder)
    file = Path(folder) / TOKENS
    dtype = np.dtype(description.dtype)
    try:
        with open(open_regular(file), "rb") as opened:
            found, needed = os.fstat(opened.fileno()).st_size, description.count * dtype.itemsize
            if found != needed:
                raise DataError(f"{file} has {found} bytes, {needed} needed; remove {DESCRIPTION} beside it and start again")
            return np.memmap(opened, dtype, mode="r", shape=(description.count,))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; remove {DESCRIPTION} beside it and start again") from error


def _is_prepared(folder: Path, origin: Origin) -> bool:
    """Return whether the tokens are those of the corpus. Raises DataError if the digest is right, but some aren't the tokenizer's."""
    try:
        found, tokens = describe(folder), open_tokens(folder)
    except DataError:
        return False  # absent, damaged or cut short: made anew
    if found.origin != origin:
        return False
    digest, largest = xxhash.xxh3_128(), 0
    try:
        for block in _blocks(folder / TOKENS, tokens.dtype):
            digest.update(block)
            largest = max(largest, int(block.max()))
    except OSError as error:
        raise DataError(f"{folder / TOKENS} cannot be read: {error.strerror}; remove it, or change run.dir") from error
    if found.digest != digest.hexdigest():
        return False
    if largest >= origin.vocab:
        raise DataError(f"{folder / TOKENS} holds token {largest}, the tokenizer has {origin.vocab}; remove it, or change run.dir")
    return True


def _blocks(file: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the tokens by reading: a map of a disk that fails ends the process."""
    with open(open_regular(file), "rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            yield np.frombuffer(block, dtype)


def _require_own(folder: Path) -> None:
    """Raise DataError if the folder or a file in it is a link or anything else than it seems: what is written there would be elsewhere."""
    for path, needed in ((folder, "a folder"), (folder / TOKENS, "a file"), (folder / DESCRIPTION, "a file")):
        if (found := kind_of(path)) not in (None, needed):
            raise DataError(f"{path} is {found}, needed {needed}; remove it, or set run.dir to the place itself")


def _write(file, texts: Iterator[tuple[str, bytes]], tokenizer: Tokenizer, origin: Origin, each: Callable[[str], object]) -> Description:
    """Append the ids of each document to `file`, an end-of-text token between two documents."""
    dtype = dtype_for(tokenizer.vocab)
    between = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype)
    digest, count = xxhash.xxh3_128(), 0
    for name, text in texts:
        each(f"preparing the tokens of {name}")
        ids = tokenizer.encode(text)
        part = np.concatenate([between, ids]) if count else ids
        digest.update(part)
        file.write(part)
        count += part.size
    if count == 0:
        raise DataError("data.tokenizer gives no tokens for the text of data.path; it knows none of the characters: use another one")
    return Description(origin, count, dtype.str, digest.hexdigest())

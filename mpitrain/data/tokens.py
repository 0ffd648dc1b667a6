"""The tokens of a run on disk: one rank writes them once, every rank maps the file.

    tokens.bin     all ids, little-endian, nothing else
    tokens.json    Description: written last, so tokens without it are not finished
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from mpitrain.data.corpus import documents
from mpitrain.data.files import fingerprint
from mpitrain.data.tokenizer import Tokenizer, dtype_for
from mpitrain.errors import DataError

TOKENS, DESCRIPTION = "tokens.bin", "tokens.json"


class Origin(msgspec.Struct, frozen=True):
    """What the tokens were made from. Equal origins give equal tokens."""

    source: str
    path: str
    files: str  # fingerprint of the corpus
    tokenizer: str  # Tokenizer.identity
    vocab: int


class Description(msgspec.Struct, frozen=True):
    origin: Origin
    count: int
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
    origin = Origin(source, str(path or ""), fingerprint(source, path), tokenizer.identity, tokenizer.vocab)
    if _is_prepared(folder, origin):
        accept(describe(folder), open_tokens(folder))
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _replacing(folder / TOKENS) as file:
            description = _write(file, documents(source, path), tokenizer, origin, each)
            file.flush()
            accept(description, np.memmap(file.name, description.dtype, mode="r"))
            (folder / DESCRIPTION).unlink(missing_ok=True)  # an old description never stands beside new tokens
        with _replacing(folder / DESCRIPTION) as file:
            file.write(msgspec.json.format(msgspec.json.encode(description), indent=2) + b"\n")
    except OSError as error:
        raise DataError(f"{folder}: tokens cannot be written: {error.strerror}; change run.dir or free some space") from error


def describe(folder: str | Path) -> Description:
    """Return the description of prepared tokens; its digest tells whether two runs train on the same data."""
    file = Path(folder) / DESCRIPTION
    try:
        return msgspec.json.decode(file.read_bytes(), type=Description)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; prepare the tokens first") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise DataError(f"{file} is damaged: {error}; remove it and start again") from error


def open_tokens(folder: str | Path) -> np.memmap:
    """Map the prepared tokens, read-only: [tokens], in the smallest dtype that holds the vocabulary."""
    description = describe(folder)
    file = Path(folder) / TOKENS
    dtype = np.dtype(description.dtype)
    found, needed = file.stat().st_size if file.exists() else 0, description.count * dtype.itemsize
    if found != needed:
        raise DataError(f"{file} has {found} bytes, {needed} needed; remove {DESCRIPTION} beside it and start again")
    return np.memmap(file, dtype, mode="r", shape=(description.count,))


def _is_prepared(folder: Path, origin: Origin) -> bool:
    try:
        found = describe(folder)
        return found.origin == origin and found.digest == xxhash.xxh3_128_hexdigest(open_tokens(folder))
    except DataError:
        return False  # absent, damaged or cut short: made anew


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


@contextmanager
def _replacing(path: Path):
    """Yield a new file that takes the name `path` when it is complete and synced; after an error nothing is left."""
    draft = path.with_name(path.name + ".tmp")
    try:
        with open(draft, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new name itself is on disk only when the folder is synced
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""Text to token ids and back: plain bytes, or a tokenizers JSON file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from mpitrain.config import Data
from mpitrain.errors import DataError
from mpitrain.inputs import read_file, shown

MOST_BYTES = 1 << 28  # of a tokenizer.json; those of the largest models have a tenth of it

# What well-known models call the token between two documents; the first that the file has is used.
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """Ids are below `vocab`; `end_of_text` goes between two documents; `identity` is equal when the ids would be."""

    vocab: int
    end_of_text: int | None
    identity: str

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of UTF-8 `text`: [tokens], of the type `dtype_for(vocab)`."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str: ...


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Return the tokenizer that data.tokenizer names: "bytes", or the path of a tokenizers JSON file."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name))


def separator(data: Data, tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a document; None if documents are joined. Raises DataError if there is no such token."""
    if data.documents == "joined":
        return None
    if tokenizer.end_of_text is None:
        raise DataError(
            f'data.documents = "separate" needs a token between documents, data.tokenizer = "{shown(data.tokenizer)}" has none of '
            f'{", ".join(END_OF_TEXT)}; use another tokenizer, or data.documents = "joined"'
        )
    return tokenizer.end_of_text


def dtype_for(vocab: int) -> np.dtype:
    """The smallest unsigned type that holds every id, little-endian: the file means the same on every machine."""
    return np.min_scalar_type(vocab - 1).newbyteorder("<")


class ByteTokenizer:
    """A token is a byte. Byte 0, which text does not use, stands between documents, so that vocab stays 256."""

    vocab = 256
    end_of_text = 0
    identity = "bytes"

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, np.uint8)

    def decode(self, ids) -> str:
        return bytes(np.asarray(ids).tolist()).decode(errors="replace")  # tolist: an id over 255 raises instead of wrapping


class FileTokenizer:
    """The tokenizer of a Hugging Face model, from its tokenizer.json."""

    def __init__(self, file: Path):
        content = _read(file)
        self._file = file
        self._tokenizer = _parse(content, file)
        # A tokenizer.json keeps the padding and truncation it was last used with: it would cut documents silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f'data.tokenizer = "{shown(file)}" has an empty vocabulary; use a trained tokenizer or "bytes"')
        self.vocab = max(ids.values()) + 1  # ids may have gaps, and then their number is too small
        self.end_of_text = next((ids[name] for name in END_OF_TEXT if name in ids), None)
        self.identity = f"xxh3:{xxhash.xxh3_128_hexdigest(content)}"

    def encode(self, text: bytes) -> np.ndarray:
        try:
            ids = self._tokenizer.encode(text.decode(), add_special_tokens=False).ids
        except BaseException as error:
            _raise_what_is_not_the_librarys(error)
            found = f'data.tokenizer = "{shown(self._file)}"'
            raise DataError(f"{found} cannot encode the text: {shown(error)}; use another tokenizer") from error
        return np.array(ids, dtype_for(self.vocab))

    def decode(self, ids) -> str:
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)


def _read(file: Path) -> bytes:
    try:
        return read_file(file, MOST_BYTES)
    except OSError as error:
        advice = 'use "bytes" or the path of a tokenizer.json'
        raise DataError(f'data.tokenizer = "{shown(file)}" cannot be read: {error.strerror}; {advice}') from error


def _parse(content: bytes, file: Path):
    try:
        import tokenizers  # here, because most runs use bytes and every rank would pay for the import
    except ImportError as error:
        raise DataError(f"data.tokenizer = \"{file}\" needs the tokenizers library; pip install 'mpitrain[hf]'") from error
    try:
        return tokenizers.Tokenizer.from_str(content.decode())
    except BaseException as error:
        _raise_what_is_not_the_librarys(error)
        advice = 'use the tokenizer.json of a model, or "bytes"'
        found = f'data.tokenizer = "{shown(file)}"'
        raise DataError(f"{found} is not a tokenizers JSON file: {shown(error)}; {advice}") from error


def _raise_what_is_not_the_librarys(error: BaseException) -> None:
    """Raise an error again that isn't the library's own: plain Exception, or a panic, which is no Exception."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error

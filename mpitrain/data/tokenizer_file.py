"""The tokenizer of a Hugging Face model, from its tokenizer.json.

A special token that is spelled out in a text is text. The library says so of what it cuts out of a
text before its model sees it (`encode_special_tokens`); a model that has the token among its own
words finds it all the same. Then the text is cut within that word.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash

from mpitrain.data.cutting import MEMORY_PER_BYTE, TokenizerModel, cutting, tree_of
from mpitrain.data.panics import LibraryFailure, library_calls
from mpitrain.data.special_tokens import (
    CONFIG,
    OLDER_END_OF_TEXT,
    Declared,
    begin_of_text,
    declared,
    declared_in,
    end_of_text,
)
from mpitrain.data.token_dtype import dtype_for
from mpitrain.data.tokenizer_probe import require_harmless
from mpitrain.errors import DataError
from mpitrain.inputs import os_errors_as, read_file, shown

MOST_TOKENS = 1 << 24  # ids of a vocabulary; the largest published ones have 2**18
MOST_BYTES = 1 << 28  # of a tokenizer.json; those of the largest models have a tenth of it
MEMORY_OF_FILE = 20  # bytes that a tokenizer takes for each of its file's: Gemma-3's 33 MB take 616
FILE = "tokenizer.json"


def read_tokenizer(file: Path, end: str | None = None, begin: str | None = None) -> "FileTokenizer":
    """Read a tokenizers JSON file, and what lies beside it. Raises DataError."""
    content = _read(file)
    require_harmless(content, f'data.tokenizer = "{shown(file)}"')
    return FileTokenizer(content, declared(file), file, end, begin)


def tokenizer_in(
    files: Mapping[str, bytes], file: Path, end: str | None, begin: str | None
) -> "FileTokenizer":
    """Return the tokenizer whose files() these are. file: where it was read, for messages."""
    return FileTokenizer(files[FILE], declared_in(files[CONFIG]), file, end, begin)


class FileTokenizer:
    """The tokenizer of a tokenizers JSON file. special: numbers of its special tokens, by their texts."""

    memory_per_byte = MEMORY_PER_BYTE

    def __init__(
        self, content: bytes, says: Declared, file: Path, end: str | None = None, begin: str | None = None
    ):
        self.file = file
        self._declared = says
        self._tokenizer = _parse(content, file)
        # a tokenizer.json keeps the truncation it was last used with, which would cut documents silently
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        where = f'data.tokenizer = "{shown(file)}"'
        if not ids:
            raise DataError(f'{where} has an empty vocabulary; use a trained tokenizer or "bytes"')
        self.vocab = max(ids.values()) + 1  # ids may have gaps, and then their number is too small
        if self.vocab > MOST_TOKENS:
            found = f"a token {self.vocab - 1:,}, at most {MOST_TOKENS - 1:,} are read"
            raise DataError(f"{where} has {found}; use another tokenizer")
        self.older_end_of_text = next((ids[name] for name in OLDER_END_OF_TEXT if name in ids), None)
        tree = tree_of(content)
        self.unknown = _unknown(tree.model, ids) if tree else None
        no_ascii = (f"<0x{byte:02X}>" for byte in range(0xFF, 0x7F, -1))
        self.stray_byte = next((ids[name] for name in no_ascii if name in ids), None)
        self.identity = _identity(content)
        added = self._tokenizer.get_added_tokens_decoder().items()
        self.special = {token.content: number for number, token in added if token.special}
        self._choose(ids, end, begin)
        chosen = [id_ for id_ in (self.end_of_text, self.begin_of_text) if id_ is not None]
        self._is_control = np.zeros(self.vocab, bool)
        self._is_control[[*self.special.values(), *chosen]] = True
        if self.unknown is not None:
            self._is_control[self.unknown] = False  # what any text may give
            chosen.append(self.unknown)
        self.needed = self._rows_needed(ids, chosen)
        self.memory = MEMORY_OF_FILE * len(content)
        self._cutting = cutting(tree, self._tokenizer.get_vocab(with_added_tokens=False))

    def files(self) -> dict[str, bytes]:
        content = _read(self.file)
        if _identity(content) != self.identity:
            raise DataError(
                f'data.tokenizer = "{shown(self.file)}" has changed since the run began to read it; '
                "run the same command again"
            )
        return {FILE: content, CONFIG: self._declared.as_config()}

    def _choose(self, ids: dict[str, int], end: str | None, begin: str | None) -> None:
        """Settle which tokens stand between documents and before each."""
        known = self.special, ids, self._declared
        found = end_of_text(end, *known), begin_of_text(begin, *known, self._first_of_a_text())
        self.end_of_text, self.begin_of_text = (None if each is None else each.id for each in found)
        between, before = (f"{shown(each.name)} ({each.id}, {each.why})" if each else "" for each in found)
        self.description = f"{between or 'nothing'} between documents"
        if not between and end is None:
            self.description += ": the tokenizer has no special token known for it (data.end_of_text)"
        self.description += f", {before} before each" * bool(before)

    def _rows_needed(self, ids: Mapping[str, int], put_there: Collection[int]) -> int:
        """Return the rows of an embedding that texts need: one more than the highest id of any.

        Special tokens that are no words of the model need none: Gemma 3's 1B has 262,144 rows and ids up to
        262,144, the last ones for images.
        put_there: tokens between documents and before them, and the one for the unknown.
        """
        own = set(self._tokenizer.get_vocab(with_added_tokens=False).values())
        unmade = {*self.special.values()} - own - {*put_there}
        return 1 + max((number for number in ids.values() if number not in unmade), default=0)

    def _first_of_a_text(self) -> str:
        """Return the name of the token that the tokenizer itself puts in front of a text; "": none."""
        with suppress(LibraryFailure), library_calls():
            (found,) = self._tokenizer.encode_batch(["a"], add_special_tokens=True)
            return found.tokens[0] if found.special_tokens_mask[:1] == [1] else ""
        return ""

    def _calls(self, failure: str) -> AbstractContextManager[None]:
        """Raise DataError for an error of the library. failure: what it can't do then."""
        what = f'data.tokenizer = "{shown(self.file)}" cannot {failure}'
        return library_calls(lambda why: DataError(f"{what}: {why}; use another tokenizer"))

    def pieces(self, text: bytes) -> Iterator[bytes]:
        return self._cutting.pieces(text)

    def encode(self, text: bytes) -> np.ndarray:
        with self._calls("encode the text"):
            # encode() holds Python's lock to the end, for minutes: no thread would hear a signal.
            (found,) = self._tokenizer.encode_batch_fast([text.decode()], add_special_tokens=False)
            ids = np.fromiter(found.ids, dtype_for(self.vocab), len(found))
            has_control_tokens = self._is_control.take(ids).any()
        return self._without_control_tokens(text.decode()) if has_control_tokens else ids

    def encode_with_special(self, text: str) -> list[int]:
        """Return the ids of text in which special tokens that are spelled out are these tokens.

        The text is a chat template's, never data. Nothing is put in front.
        """
        self._tokenizer.encode_special_tokens = False
        try:
            with self._calls("encode the text"):
                (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
                return found.ids
        finally:
            self._tokenizer.encode_special_tokens = True

    def decode(self, ids) -> str:
        with self._calls("decode the tokens"):
            return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def _without_control_tokens(self, text: str) -> np.ndarray:
        """Encode a text in pieces, cut after the first character of each control token's word."""
        with self._calls("encode the text"):
            (found,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        ids = np.array(found.ids, dtype_for(self.vocab))
        spans = [found.offsets[place] for place in np.flatnonzero(self._is_control[ids])]
        if not spans:
            return ids
        cuts = sorted({begin + 1 for begin, end in spans if end - begin > 1})
        if not cuts:
            made = f"makes its control token {int(ids[self._is_control[ids]][0])} of a character"
            character = shown(text[slice(*spans[0])])
            raise DataError(
                f'data.tokenizer = "{shown(self.file)}" {made} ({character}); use another tokenizer'
            )
        pieces = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
        return np.concatenate([self._without_control_tokens(piece) for piece in pieces if piece])


def _unknown(model: TokenizerModel, ids: dict[str, int]) -> int | None:
    """Return the id of what the tokenizer has no token for; None: there is none, as with bytes."""
    if isinstance(model.unk_token, str):
        return ids.get(model.unk_token)
    return model.unk_id if isinstance(model.unk_id, int) and 0 <= model.unk_id <= max(ids.values()) else None


def _identity(content: bytes) -> str:
    return f"xxh3:{xxhash.xxh3_128_hexdigest(content)}"


def _read(file: Path) -> bytes:
    advice = 'use "bytes" or the path of a tokenizer.json'
    with os_errors_as(DataError, f'data.tokenizer = "{shown(file)}" cannot be read', advice):
        return read_file(file, MOST_BYTES)


def _parse(content: bytes, file: Path):
    try:
        import tokenizers  # here: most runs use bytes, and every rank would pay for the import
    except ImportError as error:
        raise DataError(
            f"data.tokenizer = \"{file}\" needs the tokenizers library; pip install 'mpitrain[hf]'"
        ) from error
    found = f'data.tokenizer = "{shown(file)}" is not a tokenizers JSON file'
    advice = 'use the tokenizer.json of a model, or "bytes"'
    with library_calls(lambda why: DataError(f"{found}: {why}; {advice}")):
        return tokenizers.Tokenizer.from_str(content.decode())

"""The tokens of a run on disk: one rank writes them once (preparation.py), every rank maps the file.

tokens.bin   all ids, little-endian, nothing else
ends.bin     where each document ends: the index after its last token, its end of text included
unscored.bin runs of tokens that carry no loss as targets, begin and end of each; absent if there are none
verified.json, copies.bin, packed.bin    what a start needn't find out again (verified.py)
tokens.json  Description: written last, so tokens without it are not finished; draft.py says what is
             kept of those
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from mpitrain.data.draft import BLOCK_BYTES, read_kept
from mpitrain.data.origin import (
    ENDS,
    ENDS_DTYPE,
    MOST_BYTES,
    NUMBERS,
    OWN,
    TOKENS,
    UNSCORED,
    Count,
    CountOrNone,
    Origin,
    ReadCounts,
)
from mpitrain.data.read_tokens import MAP, Tokens, open_numbers
from mpitrain.data.token_dtype import dtype_for
from mpitrain.data.tokenizer import Tokenizer, Vocabulary
from mpitrain.data.verified import is_noted, note
from mpitrain.errors import DataError
from mpitrain.inputs import kind_of, open_regular, os_errors_as, read_regular, replacing, shown

DESCRIPTION = "tokens.json"
NO_ENDS = np.empty(0, ENDS_DTYPE)


class Description(msgspec.Struct, frozen=True):
    """What is in tokens.bin. digest: xxh3-128 of its bytes.

    ends: that of ends.bin; "": none, of tokens of form 1.
    copies_apart: copies of held-out documents aren't trained on; conversations_whole: none is cut for
    validation. Runs begun before that keep their split.
    unscored: digest of unscored.bin, "": there is none.  num_unscored: the runs in it.
    """

    origin: Origin
    count: Count
    dtype: str
    digest: str
    ends: str = ""
    tally: ReadCounts = ReadCounts()
    copies_apart: bool = False
    conversations_whole: bool = False
    unscored: str = ""
    num_unscored: CountOrNone = 0

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the tokens, the description last."""
        return (TOKENS, ENDS, *[UNSCORED] * bool(self.unscored), DESCRIPTION)

    @property
    def content(self) -> str:
        """What says whether two runs train on the same: equal for equal tokens with equal ends."""
        parts = (self.digest, self.ends, self.unscored)
        return "-".join(part for part in parts if part)


def keep_trained(
    folder: str | Path, source: str, tokenizer: Vocabulary, trained: str, each: Callable[[str], object]
) -> bool:
    """Return whether the tokens that a run has trained on are there and whole: its corpus may be gone."""
    folder = Path(folder)
    try:
        found = describe_complete(folder)
    except DataError:
        return False
    origin = found.origin
    special = (None, None) if origin.form == 1 else (tokenizer.end_of_text, tokenizer.begin_of_text)
    now = source, tokenizer.identity, *special
    same = (origin.source, origin.tokenizer, origin.end_of_text, origin.begin_of_text) == now
    return bool(trained) and found.content == trained and same and is_intact(folder, found, each)


def keep_tokenizer(folder: str | Path, tokenizer: Tokenizer) -> None:
    """Write a tokenizer's files into a run directory, as its own may be moved. Raises DataError."""
    for name, content in tokenizer.files().items():
        file = Path(folder) / name
        with suppress(OSError):  # absent, or another's
            if read_regular(file, len(content), OWN) == content:
                continue
        advice = "change run.dir or free some space"
        with os_errors_as(DataError, f"{file} cannot be written", advice), replacing(file, OWN) as opened:
            opened.write(content)


def num_prepared(folder: str | Path) -> int:
    """Return how many tokens of a corpus are prepared so far."""
    try:
        return describe(folder).count
    except DataError:
        kept = read_kept(Path(folder))
        return kept.count if kept else 0


def describe(folder: str | Path) -> Description:
    """Return the description of prepared tokens; its digest tells whether two runs train on the same data."""
    file = Path(folder) / DESCRIPTION
    require_own(file.parent)
    try:
        description = msgspec.json.decode(read_regular(file, MOST_BYTES, OWN), type=Description)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; prepare the tokens first") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DataError(f"{file} is damaged: {shown(error)}; remove it and start again") from error
    if description.dtype != (needed := dtype_for(description.origin.vocab).str):
        found = f"dtype {shown(repr(description.dtype))} for {description.origin.vocab} tokens"
        raise DataError(f"{file} is damaged: {found}, needed {needed!r}; remove it and start again")
    origin = description.origin
    special = max(origin.end_of_text or 0, origin.begin_of_text or 0)
    if special >= origin.vocab:
        found = f"token {special} between documents, of {origin.vocab} tokens"
        raise DataError(f"{file} is damaged: {found}; remove it and start again")
    return description


def describe_complete(folder: str | Path) -> Description:
    """Return the description of prepared tokens whose files have the sizes that it says. Raises DataError."""
    found = describe(folder)
    open_tokens(folder)
    open_ends(folder)
    open_unscored(folder)
    return found


def open_tokens(folder: str | Path, read: str = MAP) -> Tokens:
    """Open the prepared tokens, read-only: [tokens], in the smallest dtype that holds the vocabulary.

    read: data.read. A map that is refused is replaced by reading.
    """
    description = describe(folder)
    return _opened(Path(folder) / TOKENS, np.dtype(description.dtype), description.count, read)


def open_ends(folder: str | Path, read: str = MAP) -> np.ndarray:
    """Open where each document ends, read-only: [documents]; empty for tokens of form 1."""
    description = describe(folder)
    if not description.ends:
        return NO_ENDS
    return _opened(Path(folder) / ENDS, ENDS_DTYPE, description.tally.documents, read)[:]


def open_unscored(folder: str | Path, read: str = MAP) -> np.ndarray | None:
    """Open the runs of tokens without loss, read-only: [runs, 2]; None: there are none."""
    description = describe(folder)
    if not description.num_unscored:
        return None
    count = 2 * description.num_unscored
    return _opened(Path(folder) / UNSCORED, ENDS_DTYPE, count, read)[:].reshape(-1, 2)


def _opened(file: Path, dtype: np.dtype, count: int, read: str) -> Tokens:
    try:
        return open_numbers(file, dtype, count, read)
    except (DataError, OSError) as error:
        is_unreadable = isinstance(error, OSError)
        wrong = f"{file} cannot be read: {error.strerror}" if is_unreadable else error.args[0]
        raise DataError(f"{wrong}; remove {DESCRIPTION} beside it and start again") from error


def is_intact(folder: Path, found: Description, each: Callable[[str], object]) -> bool:
    """Return whether the files are those that are described: as noted, or else by is_whole()."""
    return is_noted(folder, _facts(found), found.files[:-1]) or is_whole(folder, found, each)


def note_intact(folder: Path, found: Description) -> None:
    """Note that the files are those that are described, so that later starts don't read them."""
    if not is_noted(folder, _facts(found), found.files[:-1]):
        note(folder, _facts(found), found.files[:-1])


def _facts(found: Description) -> str:
    counts = found.count, found.tally.documents, found.num_unscored, found.origin.vocab
    return f"{found.content} {found.dtype} {counts}"


def is_whole(folder: Path, found: Description, each: Callable[[str], object]) -> bool:
    """Return whether the files are those that are described. Raises DataError if they can't be right."""
    if not _has(folder / TOKENS, np.dtype(found.dtype), found.digest, found.origin.vocab, each):
        return False
    if not found.ends:
        return True
    if not _has(folder / ENDS, ENDS_DTYPE, found.ends, found.count + 1, each):
        return False
    ends = open_ends(folder)
    if int(ends[-1]) != found.count or int(ends[0]) < 0 or not _ascend(ends):
        raise DataError(f"{folder / ENDS} holds no ends of documents; remove it, or change run.dir")
    if not found.unscored:
        return True
    if not _has(folder / UNSCORED, ENDS_DTYPE, found.unscored, found.count + 1, each):
        return False
    runs = open_unscored(folder)
    if runs is None or int(runs[0, 0]) < 0 or not _ascend(np.asarray(runs).reshape(-1), least=0):
        raise DataError(f"{folder / UNSCORED} holds no runs of tokens; remove it, or change run.dir")
    return True


def _ascend(ends: np.ndarray, least: int = 1, block: int = 1 << 20) -> bool:
    parts = (ends[begin : begin + block + 1] for begin in range(0, len(ends), block))
    return all((np.diff(part) >= least).all() for part in parts)


def _has(file: Path, dtype: np.dtype, wanted: str, below: int, each: Callable[[str], object]) -> bool:
    """Return whether a file has a digest. Raises DataError if it has, and a number that is too large."""
    digest = xxhash.xxh3_128()
    largest = 0
    with os_errors_as(DataError, f"{file} cannot be read", "remove it, or change run.dir"):
        for block in _blocks(file, dtype):
            each("checking the tokens that are there")
            digest.update(block)
            largest = max(largest, int(block.max()))
    if wanted != digest.hexdigest():
        return False
    if largest >= below:
        raise DataError(
            f"{file} holds token {largest}, the tokenizer has {below}; remove it, or change run.dir"
        )
    return True


def _blocks(file: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the whole numbers by reading: a map of a disk that fails ends the process."""
    with open(open_regular(file, own=OWN), "rb") as opened:
        while count := len(block := opened.read(BLOCK_BYTES)) // dtype.itemsize:
            yield np.frombuffer(block, dtype, count)


def require_own(folder: Path) -> None:
    """Raise DataError for a link, or anything else than a folder and files: writing would go elsewhere."""
    files = ((folder / name, "a file") for name in (*NUMBERS, DESCRIPTION))
    for path, needed in ((folder, "a folder"), *files):
        if (found := kind_of(path)) not in (None, needed):
            raise DataError(
                f"{path} is {found}, needed {needed}; remove it, or set run.dir to the place itself"
            )

"""The tokens of a run on disk: one rank writes them once, every rank maps the file.

tokens.bin   all ids, little-endian, nothing else
ends.bin     where each document ends: the index after its last token, its end of text included
tokens.json  Description: written last, so tokens without it are not finished; draft.py says what is
             kept of those
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from mpitrain.data.corpus import Document, Position, all_documents
from mpitrain.data.corpus_files import (
    Listing,
    Paths,
    fingerprint,
    list_files,
    named,
    newest_of,
    sizes_of,
    unique,
    with_validation,
)
from mpitrain.data.draft import BLOCK_BYTES, DRAFT, DRAFT_ENDS, PART, Draft, read_kept
from mpitrain.data.encoding import Encoder, LocalEncoder, encoded
from mpitrain.data.origin import ENDS_DTYPE, FORM, MOST_BYTES, OWN, Count, Origin, ReadCounts
from mpitrain.data.pace import Pace
from mpitrain.data.shared_tokens import SharedFolder, link_or_copy, of_content
from mpitrain.data.tokenizer import Tokenizer, Vocabulary, dtype_for
from mpitrain.errors import DataError, InputError, StoppedEarly
from mpitrain.inputs import kind_of, open_regular, read_regular, remove, rename, replacing, shown

TOKENS = "tokens.bin"
ENDS = "ends.bin"
DESCRIPTION = "tokens.json"
# until they have their names
LINKED = "tokens.bin.shared"
LINKED_ENDS = "ends.bin.shared"
NO_ENDS = np.empty(0, ENDS_DTYPE)

Accept = Callable[["Description", np.ndarray, np.ndarray], object]
EncoderOf = Callable[[Tokenizer, int], Encoder]


class Description(msgspec.Struct, frozen=True):
    """What is in tokens.bin.

    digest: xxh3-128 of its bytes.
    ends: that of ends.bin; "": none, of tokens of form 1.

    copies_apart: copies of held-out documents aren't trained on; runs begun before that keep their
    split.
    """

    origin: Origin
    count: Count
    dtype: str
    digest: str
    ends: str = ""
    tally: ReadCounts = ReadCounts()
    copies_apart: bool = False

    @property
    def content(self) -> str:
        """What says whether two runs train on the same: equal for equal tokens with equal ends."""
        return f"{self.digest}-{self.ends}" if self.ends else self.digest


def prepare(
    source: str,
    path: Paths,
    tokenizer: Tokenizer,
    folder: str | Path,
    accept: Accept = lambda description, tokens, ends: None,
    each: Callable[[str], object] = lambda document: None,
    trained: str = "",
    text_key: str = "text",
    val_path: Paths = None,
    *,
    encoder_of: EncoderOf = lambda tokenizer, num_bytes: LocalEncoder(tokenizer),
    say: Callable[[str], object] = lambda line: None,
    shared: str | Path = "",
) -> None:
    """Write the tokens of a corpus into `folder`, unless the very same ones are there already.

    For one rank only. Files get their names when they are synced; of unfinished tokens a killed
    process leaves what the next one goes on from, with the same bytes in the end.
    accept: raises what keeps these tokens from being used, before any others are replaced.
    each: called with each document's name; if it raises StoppedEarly, what is prepared is kept.
    trained: Description.content of what the run has trained on, which it keeps.
    encoder_of: what encodes so many bytes.
    say: prints a line.
    shared: data.tokens, "" for none.
    """
    folder = Path(folder)
    _require_own(folder)
    listing = unique(source, list_files(source, path), each)
    key = text_key if source == "jsonl" else ""
    num_validation = 0
    if val_path:
        validation = unique(source, list_files(source, val_path, "data.val_path"), each)
        listing = with_validation(listing, validation)
        num_validation = len(validation.files)
    made = tokenizer.identity, tokenizer.vocab, FORM, tokenizer.end_of_text
    origin = Origin(
        source, named(path), fingerprint(listing), *made, key, tokenizer.begin_of_text, num_validation
    )
    if _is_prepared(folder, origin, trained, each) or _are_purged(folder, listing, trained, each, say):
        accept(describe(folder), open_tokens(folder), open_ends(folder))
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = SharedFolder(shared, origin, listing, each) if shared else None
        if place and _is_taken(place, folder, origin, accept, each, say):
            return
        texts = partial(all_documents, source, path, listing, text_key=text_key)
        first = len(listing.files) - num_validation if num_validation else None
        work = _Work(origin, texts, first, tokenizer, encoder_of, sizes_of(listing), say)
        description = _prepared(folder, work, accept, each)
        description = msgspec.structs.replace(description, tally=_with_listing(description.tally, listing))
        _finish(folder, description, DRAFT, DRAFT_ENDS)
        if place and (trouble := place.publish(folder, (TOKENS, ENDS, DESCRIPTION))):
            say(trouble)
    except OSError as error:
        raise DataError(
            f"{folder}: tokens cannot be written: {error.strerror}; change run.dir or free some space"
        ) from error


def _finish(folder: Path, description: Description, tokens: str, ends: str) -> None:
    """Give complete tokens and ends their names, and describe them. Raises OSError."""
    remove(folder / DESCRIPTION, OWN)  # an old description never stands beside new tokens
    rename(folder / tokens, TOKENS, OWN)
    rename(folder / ends, ENDS, OWN)
    with replacing(folder / DESCRIPTION, OWN) as file:
        file.write(msgspec.json.format(msgspec.json.encode(description), indent=2) + b"\n")
    for name in (PART, DRAFT, DRAFT_ENDS):
        remove(folder / name, OWN)


def _is_taken(
    place: SharedFolder,
    folder: Path,
    origin: Origin,
    accept: Accept,
    each: Callable[[str], object],
    say: Callable[[str], object],
) -> bool:
    """Take the tokens that another run has published, if they are whole; return whether they are."""
    if not place.is_there(DESCRIPTION):
        return False
    try:
        found = describe(place.path)
        tokens = open_tokens(place.path)
        ends = open_ends(place.path)
        whole = of_content(found.origin) == of_content(origin) and is_whole(place.path, found, each)
    except DataError:
        whole = False
    if not whole:
        say(f"data.tokens: what is in {shown(place.path)} is damaged or not complete; it is made anew")
        return False
    description = msgspec.structs.replace(found, origin=origin)
    accept(description, tokens, ends)
    link_or_copy(place.path / TOKENS, folder / LINKED)
    link_or_copy(place.path / ENDS, folder / LINKED_ENDS)
    _finish(folder, description, LINKED, LINKED_ENDS)
    say(f"data.tokens: {shown(place.path)} has the tokens of this text and tokenizer")
    return True


def keep_trained(
    folder: str | Path, source: str, tokenizer: Vocabulary, trained: str, each: Callable[[str], object]
) -> bool:
    """Return whether the tokens that a run has trained on are there and whole: then its corpus may
    be gone.
    """
    folder = Path(folder)
    try:
        found = describe(folder)
        open_tokens(folder)
        open_ends(folder)
    except DataError:
        return False
    origin = found.origin
    form_1 = found.origin.form == 1
    now = (
        source,
        tokenizer.identity,
        *((None, None) if form_1 else (tokenizer.end_of_text, tokenizer.begin_of_text)),
    )
    same = (origin.source, origin.tokenizer, origin.end_of_text, origin.begin_of_text) == now
    return bool(trained) and found.content == trained and same and is_whole(folder, found, each)


def keep_tokenizer(folder: str | Path, tokenizer: Tokenizer) -> None:
    """Write what is needed of a tokenizer into a run directory, unless it is there.

    Its file may be moved or removed. Raises DataError.
    """
    for name, content in tokenizer.files().items():
        file = Path(folder) / name
        try:
            if read_regular(file, len(content), OWN) == content:
                continue
        except OSError:
            pass  # absent, or another's
        try:
            with replacing(file, OWN) as opened:
                opened.write(content)
        except OSError as error:
            raise DataError(
                f"{file} cannot be written: {error.strerror}; change run.dir or free some space"
            ) from error


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
    _require_own(file.parent)
    try:
        description = msgspec.json.decode(read_regular(file, MOST_BYTES, OWN), type=Description)
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
    return _mapped(Path(folder) / TOKENS, np.dtype(description.dtype), description.count)


def open_ends(folder: str | Path) -> np.ndarray:
    """Map where each document ends, read-only.

    [documents]; empty where that is not written, of tokens of form 1.
    """
    description = describe(folder)
    if not description.ends:
        return NO_ENDS
    return _mapped(Path(folder) / ENDS, ENDS_DTYPE, description.tally.documents)


def _mapped(file: Path, dtype: np.dtype, count: int) -> np.memmap:
    try:
        with open(open_regular(file, own=OWN), "rb") as opened:
            found = os.fstat(opened.fileno()).st_size
            needed = count * dtype.itemsize
            if found != needed or not needed:
                raise DataError(
                    f"{file} has {found} bytes, {needed} needed; remove {DESCRIPTION} beside it and start "
                    "again"
                )
            return np.memmap(opened, dtype, mode="r", shape=(count,))
    except OSError as error:
        raise DataError(
            f"{file} cannot be read: {error.strerror}; remove {DESCRIPTION} beside it and start again"
        ) from error


def _is_prepared(folder: Path, origin: Origin, trained: str, each: Callable[[str], object]) -> bool:
    """Return whether the tokens are those of the corpus.

    Raises DataError if the digest is right, but some aren't the tokenizer's.

    Those of form 1 are, if the run has trained on them: a corpus is read differently since.
    """
    try:
        found = describe(folder)
        open_tokens(folder)
        open_ends(folder)
    except DataError:
        return False  # absent, damaged or cut short: made anew
    older = found.origin.form == 1 and found.content == trained
    return (older or found.origin.gives_the_same_as(origin)) and is_whole(folder, found, each)


def _are_purged(
    folder: Path, listing: Listing, trained: str, each: Callable[[str], object], say: Callable[[str], object]
) -> bool:
    """Return whether files of the corpus were removed since, no other changed, and its tokens are there.

    A purge of scratch space takes what was not read for some weeks: a run that has its tokens needs
    no text.
    """
    try:
        found = describe(folder)
        since = (folder / DESCRIPTION).stat().st_mtime_ns
    except (DataError, OSError):
        return False
    lacking = found.tally.files - len(listing.files)
    fewer = bool(trained) and found.content == trained and lacking > 0 and newest_of(listing) < since
    if not fewer or not is_whole(folder, found, each):
        return False
    many = f"{lacking:,} of {found.tally.files:,} files are gone"
    say(f"data.path: {many}; going on with the tokens in {shown(folder)}, which the run has trained on")
    return True


def is_whole(folder: Path, found: Description, each: Callable[[str], object]) -> bool:
    """Return whether tokens and ends are those that are described.

    Raises DataError if they are, but can't be right.
    """
    if not _has(folder / TOKENS, np.dtype(found.dtype), found.digest, found.origin.vocab, each):
        return False
    if not found.ends:
        return True
    if not _has(folder / ENDS, ENDS_DTYPE, found.ends, found.count + 1, each):
        return False
    ends = open_ends(folder)
    if int(ends[-1]) != found.count or int(ends[0]) < 0 or not _ascend(ends):
        raise DataError(f"{folder / ENDS} holds no ends of documents; remove it, or change run.dir")
    return True


def _ascend(ends: np.ndarray, block: int = 1 << 20) -> bool:
    return all((np.diff(ends[begin : begin + block + 1]) > 0).all() for begin in range(0, len(ends), block))


def _has(file: Path, dtype: np.dtype, wanted: str, below: int, each: Callable[[str], object]) -> bool:
    """Return whether a file has a digest.

    Raises DataError if it has, but not all its numbers are below a limit.
    """
    digest = xxhash.xxh3_128()
    largest = 0
    try:
        for block in _blocks(file, dtype):
            each("checking the tokens that are there")
            digest.update(block)
            largest = max(largest, int(block.max()))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}; remove it, or change run.dir") from error
    if wanted != digest.hexdigest():
        return False
    if largest >= below:
        raise DataError(
            f"{file} holds token {largest}, the tokenizer has {below}; remove it, or change run.dir"
        )
    return True


def _blocks(file: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the numbers by reading: a map of a disk that fails ends the process."""
    with open(open_regular(file, own=OWN), "rb") as opened:
        while block := opened.read(BLOCK_BYTES):
            yield np.frombuffer(block, dtype)


def _require_own(folder: Path) -> None:
    """Raise DataError if the folder or a file in it is a link or anything else than it seems.

    What is written there would be elsewhere.
    """
    for path, needed in (
        (folder, "a folder"),
        *((folder / name, "a file") for name in (TOKENS, ENDS, DESCRIPTION)),
    ):
        if (found := kind_of(path)) not in (None, needed):
            raise DataError(
                f"{path} is {found}, needed {needed}; remove it, or set run.dir to the place itself"
            )


def _with_listing(tally: ReadCounts, listing: Listing) -> ReadCounts:
    """Add what was read and left out of whole files."""
    for reason, names in listing.left_out.items():
        tally = tally.without(reason, names)
    return msgspec.structs.replace(tally, files=len(listing.files))


class _Work(NamedTuple):
    """What is to be prepared. texts: the documents from a position on.  sizes: of all files.

    first_of_validation: the first file of data.val_path.
    """

    origin: Origin
    texts: Callable[[Position], Iterator[Document]]
    first_of_validation: int | None
    tokenizer: Tokenizer
    encoder_of: EncoderOf
    sizes: Sequence[int]
    say: Callable[[str], object]


def _prepared(folder: Path, work: _Work, accept: Accept, each: Callable[[str], object]) -> Description:
    """Write all tokens into the draft, and return their description.

    Raises what `accept` and `each` do, and OSError.
    """
    dtype = dtype_for(work.tokenizer.vocab)
    draft = Draft(folder, work.origin, dtype, each)
    try:
        _encode(work, draft, each)
        tokens, ends = draft.complete()
        made = draft.count, dtype.str, *draft.digests, draft.tally
        description = Description(work.origin, *made, copies_apart=True)
        accept(description, tokens, ends)
        draft.close()
    except StoppedEarly:
        draft.keep()
        draft.stop()
        raise
    except InputError:  # with another text or tokenizer nothing of it is of use
        draft.stop()
        draft.drop()
        raise
    except BaseException:
        draft.stop()
        raise
    return description


def _encode(work: _Work, draft: Draft, each: Callable[[str], object]) -> None:
    """Append the ids of each document to the draft, an end-of-text token between two documents."""
    tokenizer = work.tokenizer
    between, before = (
        np.array([] if token is None else [token], dtype_for(tokenizer.vocab))
        for token in (tokenizer.end_of_text, tokenizer.begin_of_text)
    )
    encoder = work.encoder_of(tokenizer, sum(work.sizes))
    how = f"on {encoder.num_shares} rank{'s' * (encoder.num_shares > 1)}"
    pace = Pace(work.say, work.sizes, draft.after, how)
    for document, ids in encoded(_read(work.texts(draft.after), each), tokenizer, encoder, pace.encoded):
        is_first = work.first_of_validation is not None and document.file >= work.first_of_validation
        if is_first and draft.tally.training is None:
            draft.tally = msgspec.structs.replace(draft.tally, training=draft.tally.documents)
        if document.left_out:
            draft.tally = draft.tally.without(document.left_out, [document.name])
        if document.text:
            each(f"preparing the tokens of {document.name}")
        if ids.size:
            with_begin = np.concatenate([before, ids]) if before.size else ids
            tally = draft.tally.with_document(len(document.text), _num_unknown(ids, tokenizer.unknown))
            draft.add(between, with_begin, document.after, tally)
    if draft.count == 0:
        raise DataError(
            "data.tokenizer gives no tokens for the text of data.path; it knows none of the characters: use "
            "another one"
        )


def _read(documents: Iterator[Document], each: Callable[[str], object]) -> Iterator[Document]:
    for document in documents:
        each(f"reading {document.name}")
        yield document


def _num_unknown(ids: np.ndarray, unknown: int | None) -> int:
    return 0 if unknown is None else int((ids == unknown).sum())

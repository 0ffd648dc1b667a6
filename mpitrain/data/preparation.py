"""Prepare the tokens of a corpus: read its documents, tokenize them, write tokens.bin and ends.bin.

what there is                      what happens
tokens of this very corpus         they are taken, if their files look as when they were verified, or else
                                   once their digests are
those that the run trained on,     they are taken: a purge of scratch space removes files
and files of the corpus are gone
those of data.tokens               they are linked into the run directory
a draft of a killed process        it resumes, with the same bytes in the end
none of these                      all documents are tokenized
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from mpitrain.data.conversations import Conversations
from mpitrain.data.corpus import DAMAGED, Corpus, list_parts, part_documents, require_begins
from mpitrain.data.corpus_files import (
    Listing,
    fingerprint,
    list_unique,
    named,
    newest_of,
    sizes_of,
    stamps_of,
    with_validation,
)
from mpitrain.data.draft import Draft, remove_draft
from mpitrain.data.encoding import Encoder, LocalEncoder, encoded
from mpitrain.data.origin import FORM, NUMBERS, OWN, Origin, write_struct
from mpitrain.data.pace import Pace
from mpitrain.data.read_tokens import Tokens
from mpitrain.data.shared_tokens import SharedFolder, link_or_copy, of_content
from mpitrain.data.source import SOURCES, Document, Position, Source
from mpitrain.data.token_dtype import dtype_for
from mpitrain.data.tokenizer import Tokenizer, vocabulary_of
from mpitrain.data.tokens import (
    DESCRIPTION,
    Description,
    describe,
    describe_complete,
    is_intact,
    note_intact,
    open_ends,
    open_tokens,
    require_own,
)
from mpitrain.data.verified import COPIES, PACKED
from mpitrain.errors import DataError, InputError, StoppedEarly, counted
from mpitrain.inputs import DRAFT, listed, os_errors_as, remove, rename, shown

LINKED = ".shared"  # ends the names of files of other runs, until all are there

Accept = Callable[[Description, Tokens, np.ndarray], object]
EncoderOf = Callable[[Tokenizer, int], Encoder]


class Reporter(NamedTuple):
    """Who hears how far the work is. line: prints a line.

    doing: called with what comes next; if it raises StoppedEarly, what is prepared is kept.
    """

    doing: Callable[[str], object] = lambda what: None
    line: Callable[[str], object] = lambda line: None


QUIET = Reporter()


def prepare(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    report: Reporter = QUIET,
    accept: Accept = lambda description, tokens, ends: None,
    trained: str = "",
    encoder_of: EncoderOf = lambda tokenizer, num_bytes: LocalEncoder(tokenizer),
    shared: str | Path = "",
) -> None:
    """Write the tokens of a corpus into `folder`, unless the very same ones are there already.

    One rank calls it. Files get their names when they are synced.
    accept: raises what keeps these tokens from being used, before any others are replaced.
    trained: Description.content of what the run has trained on, which it keeps.
    encoder_of: what encodes so many bytes.
    shared: data.tokens, "" for none.
    """
    folder = Path(folder)
    require_own(folder)
    work = _work(corpus, tokenizer, encoder_of, report)
    if _is_prepared(folder, work.origin, trained, report) or _are_purged(folder, work, trained):
        accept(describe(folder), open_tokens(folder), open_ends(folder))
        return
    with _writing(folder, "run.dir"):
        folder.mkdir(parents=True, exist_ok=True)
        place = SharedFolder(shared, work.origin, work.listing, report.doing, work.begins) if shared else None
        if place and _is_taken(place, folder, work, accept):
            return
        description = _prepared(folder, work, accept)
        if place and (trouble := place.publish(folder, description)):
            report.line(trouble)


def prepare_store(
    corpus: Corpus,
    tokenizer: Tokenizer,
    shared: str | Path,
    *,
    report: Reporter,
    encoder_of: EncoderOf,
    locked: Callable[[Path], AbstractContextManager],
) -> Path:
    """Write the tokens of a corpus into its folder in data.tokens, unless they are there; return it.

    One rank calls it. locked: holds a folder for one process. Raises as prepare() does.
    """
    work = _work(corpus, tokenizer, encoder_of, report)
    work = work._replace(origin=of_content(work.origin))
    place = SharedFolder(shared, work.origin, work.listing, report.doing, work.begins)
    new = [folder for folder in (place.path, place.path.parent) if not folder.exists()]
    try:
        with _writing(place.path, "data.tokens"):
            place.path.mkdir(parents=True, exist_ok=True)
            with locked(place.path):
                require_own(place.path)
                if found := _published(place, work):
                    note_intact(place.path, found)
                else:
                    _prepared(place.path, work, lambda *prepared: None)
                place.note()
    finally:
        for folder in new:
            with suppress(OSError):  # with something in it
                folder.rmdir()
    return place.path


def _writing(folder: Path, key: str) -> AbstractContextManager[None]:
    return os_errors_as(DataError, f"{folder}: tokens cannot be written", f"change {key} or free some space")


class _Work(NamedTuple):
    """What is to be prepared. texts: the documents from a position on, with so many damaged before it.

    first_of_validation: the first file of data.val_path; None: there is no such path.
    counts: files of each source.  begins: reads how each file begins.
    stamps: of the files, when they were listed.
    """

    origin: Origin
    listing: Listing
    texts: Callable[[Position, int], Iterator[Document]]
    first_of_validation: int | None
    tokenizer: Tokenizer
    encoder_of: EncoderOf
    report: Reporter
    counts: Sequence[int]
    begins: Callable[[], None]
    stamps: Mapping[Path, tuple[int, int]]


def _work(corpus: Corpus, tokenizer: Tokenizer, encoder_of: EncoderOf, report: Reporter) -> _Work:
    """List the files of a corpus."""
    listing, counts = list_parts(corpus, report.doing)
    num_validation = 0
    if corpus.val_path:
        source = SOURCES.find(corpus.source)
        validation = list_unique(source, corpus.val_path, "data.val_path", report.doing)
        listing = with_validation(listing, validation)
        num_validation = len(validation.files)
        counts = [len(listing.files)]
    stamps = stamps_of(listing)
    origin = _origin(corpus, listing, tokenizer, num_validation, counts)
    first = len(listing.files) - num_validation if num_validation else None
    rule = corpus.rule(vocabulary_of(tokenizer))._replace(conversations=Conversations(tokenizer))
    texts = partial(part_documents, corpus, listing, counts, rule)
    begins = partial(require_begins, corpus, listing, counts, rule)
    return _Work(origin, listing, texts, first, tokenizer, encoder_of, report, counts, begins, stamps)


def _origin(
    corpus: Corpus, listing: Listing, tokenizer: Tokenizer, num_validation: int, counts: Sequence[int]
) -> Origin:
    sources = [SOURCES.find(part.source) for part in corpus.parts]
    keys = [part.text_key for part, source in zip(corpus.parts, sources, strict=True) if source.keyed]
    return Origin(
        source=corpus.identity,
        path=named(corpus.path),
        files=fingerprint(listing),
        tokenizer=tokenizer.identity,
        vocab=tokenizer.vocab,
        form=FORM,
        end_of_text=tokenizer.end_of_text,
        text_key=", ".join(keys),
        begin_of_text=tokenizer.begin_of_text,
        validation_files=num_validation,
        rule=_rule_of(sources, corpus, counts, Conversations(tokenizer)),
        damaged=corpus.damaged,
    )


def _rule_of(
    sources: Sequence[Source], corpus: Corpus, counts: Sequence[int], conversations: Conversations
) -> str:
    """Return what a description notes of how ids are read; "": the tokenizer alone says it."""
    of_ids = any(source.holds_tokens for source in sources)
    given = {"ends": corpus.ends, "dtype": corpus.dtype or None} if of_ids else {}
    if any(source.converse for source in sources):
        given["template"] = conversations.identity
    given["files"] = " + ".join(map(str, counts)) if corpus.mixed else None
    return ", ".join(f"{key} = {value}" for key, value in given.items() if value is not None)


def _finish(folder: Path, description: Description, ending: str) -> None:
    """Take the ending off the names of complete files, and describe them. Raises OSError."""
    remove(folder / DESCRIPTION, OWN)  # an old description never stands beside new tokens
    for name in NUMBERS:
        if name in description.files:
            rename(folder / f"{name}{ending}", name, OWN)
        else:
            remove(folder / name, OWN)
    write_struct(folder / DESCRIPTION, description)
    note_intact(folder, description)
    remove_draft(folder)


def _published(place: SharedFolder, work: _Work) -> Description | None:
    """Return the description of published tokens, if they are there and whole."""
    if not place.is_there():
        return None
    try:
        found = describe_complete(place.path)
        same = of_content(found.origin) == of_content(work.origin)
        whole = same and is_intact(place.path, found, work.report.doing)
    except DataError:
        whole = False
    if not whole:
        damaged = f"data.tokens: what is in {shown(place.path)} is damaged or not complete"
        work.report.line(f"{damaged}; it is prepared again")
        return None
    work.report.line(f"data.tokens: {shown(place.path)} has the tokens of this text and tokenizer")
    return found


def _is_taken(place: SharedFolder, folder: Path, work: _Work, accept: Accept) -> bool:
    """Take the tokens that another run has published, if they are whole; return whether they are."""
    found = _published(place, work)
    if found is None:
        return False
    description = msgspec.structs.replace(found, origin=work.origin)
    for name in (COPIES, PACKED):  # whatever it is: it has a key of its own
        with suppress(OSError):
            link_or_copy(place.path / name, folder / name)
    accept(description, open_tokens(place.path), open_ends(place.path))
    note_intact(place.path, found)
    place.note()
    for name in description.files[:-1]:
        link_or_copy(place.path / name, folder / f"{name}{LINKED}")
    _finish(folder, description, LINKED)
    return True


def _is_prepared(folder: Path, origin: Origin, trained: str, report: Reporter) -> bool:
    """Return whether the tokens are those of the corpus; those of form 1 are, if the run has trained on them.

    Raises DataError if the digest is right, but some aren't the tokenizer's.
    """
    try:
        found = describe_complete(folder)
    except DataError:
        return False  # absent, damaged or cut short: made anew
    older = found.origin.form == 1 and found.content == trained
    return (older or found.origin.gives_the_same_as(origin)) and is_intact(folder, found, report.doing)


def _are_purged(folder: Path, work: _Work, trained: str) -> bool:
    """Return whether files of the corpus were removed since, no other changed, and its tokens are there."""
    try:
        found = describe(folder)
        since = (folder / DESCRIPTION).stat().st_mtime_ns
    except (DataError, OSError):
        return False
    lacking = found.tally.files - len(work.listing.files)
    fewer = bool(trained) and found.content == trained and lacking > 0 and newest_of(work.listing) < since
    if not fewer or not is_intact(folder, found, work.report.doing):
        return False
    many = f"{lacking:,} of {found.tally.files:,} files are gone"
    kept = f"using the tokens in {shown(folder)}, which the run has trained on"
    work.report.line(f"data.path: {many}; {kept}")
    return True


def _prepared(folder: Path, work: _Work, accept: Accept) -> Description:
    """Write all tokens, and return their description. Raises what `accept` and the reporter do, OSError."""
    dtype = dtype_for(work.tokenizer.vocab)
    draft = Draft(folder, work.origin, dtype, work.report.doing)
    try:
        _encode(work, draft)
        _require_unchanged(work)
        tokens, ends = draft.complete()
        if not draft.carries_loss:
            raise DataError("data.path: no token carries loss, its loss masks are 0 everywhere; give others")
        made = draft.count, dtype.str, *draft.digests, draft.tally
        digest, runs = draft.unscored
        of_split = dict(copies_apart=True, conversations_whole=True)
        description = Description(work.origin, *made, **of_split, unscored=digest, num_unscored=runs)
        accept(description, tokens, ends)
        draft.close()
    except BaseException as error:
        if isinstance(error, StoppedEarly):
            draft.keep()
        draft.stop()
        if isinstance(error, InputError):  # with another text or tokenizer nothing of it is of use
            remove_draft(folder)
        raise
    tally = msgspec.structs.replace(description.tally, files=len(work.listing.files))
    for reason, names in work.listing.left_out.items():
        tally = tally.with_named("left_out", reason, names)
    description = msgspec.structs.replace(description, tally=tally)
    _finish(folder, description, DRAFT)
    return description


def _require_unchanged(work: _Work) -> None:
    """Raise DataError for files that were written to since they were listed: nobody knows what was read."""
    now = stamps_of(work.listing)
    if changed := [path for path, stamp in work.stamps.items() if now[path] != stamp]:
        raise DataError(
            f"data.path: {listed(changed, 3)} changed while it was read; start again when nobody writes to it"
        )


def _encode(work: _Work, draft: Draft) -> None:
    """Append the ids of each document to the draft, an end-of-text token between two documents."""
    tokenizer = work.tokenizer
    each = work.report.doing
    sizes = sizes_of(work.listing)
    between, before = (
        np.array([] if token is None else [token], dtype_for(tokenizer.vocab))
        for token in (tokenizer.end_of_text, tokenizer.begin_of_text)
    )
    encoder = work.encoder_of(tokenizer, sum(sizes))
    how = f"on {counted(encoder.num_ranks, 'ranks')}"
    pace = Pace(work.report.line, sizes, draft.after, how)
    damaged = draft.tally.left_out.get(DAMAGED)
    documents = _read(work.texts(draft.after, damaged.count if damaged else 0), each)
    for document, ids in encoded(documents, tokenizer, encoder, pace.encoded):
        is_first = work.first_of_validation is not None and document.file >= work.first_of_validation
        if is_first and draft.tally.training is None:
            draft.tally = msgspec.structs.replace(draft.tally, training=draft.tally.documents)
        if document.left_out:
            draft.tally = draft.tally.with_named("left_out", document.left_out, [document.name])
        if document.num_bytes:
            each(f"preparing the tokens of {document.name}")
        if ids.size:
            part = int(np.searchsorted(np.cumsum(work.counts), document.file, side="right"))
            draft.tally = draft.tally.with_part(part, len(work.counts))
            _add(draft, document, ids, between, before, tokenizer.unknown)
    if draft.count == 0:
        found = "data.tokenizer gives no tokens for the text of data.path"
        raise DataError(f"{found}; it knows none of the characters: use another one")


def _add(
    draft: Draft,
    document: Document,
    ids: np.ndarray,
    between: np.ndarray,
    before: np.ndarray,
    unknown: int | None,
) -> None:
    """Append a document's ids to the draft, and count it."""
    if document.complete:
        between = before = np.empty(0, ids.dtype)
    with_begin = np.concatenate([before, ids]) if before.size else ids
    num_unknown = 0 if unknown is None else int((ids == unknown).sum())
    tally = draft.tally.with_document(document.num_bytes, num_unknown)
    for field, kind in (("marked", document.markup), ("remarks", document.remark)):
        if kind:
            tally = tally.with_named(field, kind, [document.name])
    scored = document.scored
    if scored is not None:  # nothing predicts how a document begins
        scored = np.concatenate([np.zeros(before.size, bool), scored])
    draft.add(between, with_begin, document.after, tally, scored)


def _read(documents: Iterator[Document], each: Callable[[str], object]) -> Iterator[Document]:
    for document in documents:
        each(f"reading {document.name}")
        yield document

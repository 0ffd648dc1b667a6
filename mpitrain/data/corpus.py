"""The documents of a corpus: files of one source, in an order that is always the same."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import msgspec

from mpitrain.config import Data
from mpitrain.data.corpus_files import (
    Listing,
    Paths,
    left_out_of,
    list_unique,
    named,
    no_text,
    refused,
    unique,
)
from mpitrain.data.source import BEGIN, SOURCES, Damaged, Document, File, Position, Source, TokenRule
from mpitrain.data.token_files import NO_RULE, token_documents
from mpitrain.data.tokenizer import Vocabulary
from mpitrain.errors import ConfigError, DataError, counted
from mpitrain.inputs import shown

DAMAGED = "damaged"
MIXTURE = "mixture"


class CorpusPart(NamedTuple):
    """A source of a mixture, or the only one."""

    source: str
    path: Paths
    text_key: str


class Corpus(NamedTuple):
    """What is trained on and validated with: keys of the table [data].

    mixed: the sources of a mixture, in place of `source`, `path` and `text_key`.
    """

    source: str
    path: Paths = None
    val_path: Paths = None
    text_key: str = "text"
    ends: int | Literal["none"] | None = None
    dtype: str = ""
    damaged: int = 0
    mixed: tuple[CorpusPart, ...] = ()

    @property
    def parts(self) -> tuple[CorpusPart, ...]:
        return self.mixed or (CorpusPart(self.source, self.path, self.text_key),)

    @property
    def key(self) -> str:
        """Return the name of the setting, for messages."""
        return "data.sources" if self.mixed else "data.path"

    @property
    def identity(self) -> str:
        """Return what prepared tokens note of the sources."""
        names = [SOURCES.find(part.source).identity(part.source) for part in self.parts]
        return f"{MIXTURE}: {', '.join(names)}" if self.mixed else names[0]

    def rule(self, tokenizer: Vocabulary) -> TokenRule:
        """Return how files of ids are read."""
        end = tokenizer.end_of_text if self.ends is None else self.ends
        known = (tokenizer.end_of_text, tokenizer.begin_of_text, tokenizer.vocab, self.dtype)
        return TokenRule(None if end == "none" else end, *known)


def corpus_of(data: Data) -> Corpus:
    """Return the corpus of a configuration. Raises ConfigError for conversations that would be cut."""
    for kind in data.kinds:
        if SOURCES.find(kind).converse and data.documents != "packed":
            raise ConfigError(
                f'data.source = "{kind}" with data.documents = "{data.documents}" would cut answers '
                'from their prompts; use data.documents = "packed"'
            )
    keys = data.ends, data.dtype, data.damaged
    if not data.sources:
        return Corpus(data.source, data.path, data.val_path, data.text_key, *keys)
    mixed = tuple(CorpusPart(part.source, part.path or None, part.text_key) for part in data.sources)
    paths = [[part.path] if isinstance(part.path, str) else part.path for part in data.sources]
    names = [name for path in paths for name in path]
    return Corpus(MIXTURE, names, data.val_path, data.text_key, *keys, mixed)


def documents(corpus: Corpus, begin: Position = BEGIN) -> Iterator[Document]:
    """Yield every document of data.path that is not empty, always in the same order, from `begin` on.

    Raises DataError that names all files that can't be read, when it has come to the end.
    """
    source = SOURCES.find(corpus.source)
    for document in all_documents(source, corpus, list_unique(source, corpus.path), begin):
        if document.num_bytes:
            yield document


def all_documents(
    source: Source,
    corpus: Corpus,
    listing: Listing,
    begin: Position = BEGIN,
    rule: TokenRule = NO_RULE,
    num_damaged: int = 0,
) -> Iterator[Document]:
    """Yield the documents of a listing, those with nothing in them, too.

    num_damaged: documents before `begin` that were damaged. From the first damaged file on, or the
    first document that is one more than data.damaged, they have nothing any more.
    """
    found = begin != BEGIN
    problems = dict[int, tuple[str, int]]()  # of a file: the first of it, and how many there are
    left = corpus.damaged - num_damaged
    for number, file in enumerate(listing.files[begin.files :], start=begin.files):
        within = begin if number == begin.files else Position(number)
        try:
            for document in _of_file(source, file, within, corpus.text_key, rule):
                if document.damage and left > 0:
                    left -= 1
                    document = document.emptied()._replace(left_out=DAMAGED)
                elif document.damage:
                    _note(problems, number, document.damage)
                found = found or bool(document.num_bytes)
                yield (document.emptied() if problems else document)._replace(file=number)
        except Damaged as error:
            _note(problems, number, error.args[0])
        except OSError as error:
            _note(problems, number, f"{shown(error.filename or file.path)} cannot be read: {error.strerror}")
    if problems:
        named_problems = [
            first + f" (and {counted(count - 1, 'more lines', ',')})" * (count > 1)
            for first, count in problems.values()
        ]
        raise refused(named_problems, source.advice.format(text_key=shown(corpus.text_key)), corpus.key)
    if not found:
        raise no_text(source, corpus.path, listing.left_out, corpus.key)


def list_parts(corpus: Corpus, each: Callable[[str], object]) -> tuple[Listing, list[int]]:
    """Return the files of all sources, one source after the other, and how many each has.

    Raises DataError for a source whose files are all copies of earlier ones.
    """
    found = [list_unique(SOURCES.find(part.source), part.path, corpus.key, each) for part in corpus.parts]
    if len(found) == 1:
        return found[0], [len(found[0].files)]
    files = [file for listing in found for file in listing.files]
    whole = unique(Listing(files, left_out_of(found)), each)
    kept = {id(file) for file in whole.files}
    counts = [sum(id(file) in kept for file in listing.files) for listing in found]
    if 0 in counts:
        empty = corpus.parts[counts.index(0)]
        raise DataError(
            f'data.sources: of path = "{named(empty.path)}" every file is among those of a source before '
            "it; give each source its own files"
        )
    return whole, counts


def moved(position: Position, files: int) -> Position:
    """Return a position with so many more files before it."""
    return msgspec.structs.replace(position, files=position.files + files)


def part_documents(
    corpus: Corpus, listing: Listing, counts: list[int], rule: TokenRule, begin: Position, num_damaged: int
) -> Iterator[Document]:
    """Yield the documents of all sources, as all_documents() does those of one."""
    first = 0
    for part, count in zip(corpus.parts, counts, strict=True):
        if first + count > begin.files or not count:  # none but empty files, which are named
            within = moved(begin, -first) if begin.files >= first else BEGIN
            own = corpus._replace(source=part.source, path=part.path, text_key=part.text_key)
            left_out = listing.left_out if len(counts) == 1 else {}
            files = Listing(listing.files[first : first + count], left_out)
            for document in all_documents(SOURCES.find(part.source), own, files, within, rule, num_damaged):
                num_damaged += document.left_out == DAMAGED
                after = moved(document.after, first)
                yield document._replace(file=document.file + first, after=after)
        first += count


def require_begins(corpus: Corpus, listing: Listing, counts: list[int], rule: TokenRule) -> None:
    """Read how each file begins, before any is read whole to be compared. Raises DataError.

    A header or an index can declare far more than its file holds.
    """
    for number in range(len(listing.files)):
        first = next(part_documents(corpus, listing, counts, rule, Position(number), 0), None)
        if first is None or first.file != number:  # damaged, or without a document
            for _ in part_documents(corpus, listing, counts, rule, BEGIN, 0):
                pass
            return


def _note(problems: dict[int, tuple[str, int]], number: int, damage: str) -> None:
    first, count = problems.get(number, (damage, 0))
    problems[number] = first, count + 1


def _of_file(
    source: Source, file: File, begin: Position, text_key: str, rule: TokenRule
) -> Iterator[Document]:
    """Yield the documents of a file, as its source reads it."""
    if source.choose:
        source = source.choose(file)
    if source.converse and rule.conversations:
        return source.converse(file, begin, rule.conversations)
    if source.tokens:
        return token_documents(file, source.tokens(file, rule), begin, rule)
    if source.read is None:
        raise TypeError(f"the source {source.name} says neither how to read a file nor which ids it has")
    return source.read(file, begin, text_key)

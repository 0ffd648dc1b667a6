"""The documents of a corpus: files of one source, in an order that is always the same."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from mpitrain.config import Data
from mpitrain.data.corpus_files import Listing, Paths, list_unique, no_text, refused
from mpitrain.data.source import BEGIN, SOURCES, Damaged, Document, File, Position, Source, TokenRule
from mpitrain.data.token_files import NO_RULE, token_documents
from mpitrain.data.tokenizer import Vocabulary
from mpitrain.inputs import shown

DAMAGED = "damaged"


class Corpus(NamedTuple):
    """What is trained on and validated with: keys of the table [data]."""

    source: str
    path: Paths = None
    val_path: Paths = None
    text_key: str = "text"
    ends: int | Literal["none"] | None = None
    dtype: str = ""
    damaged: int = 0

    def rule(self, tokenizer: Vocabulary) -> TokenRule:
        """Return how files of ids are read."""
        end = tokenizer.end_of_text if self.ends is None else self.ends
        known = (tokenizer.end_of_text, tokenizer.begin_of_text, tokenizer.vocab, self.dtype)
        return TokenRule(None if end == "none" else end, *known)


def corpus_of(data: Data) -> Corpus:
    """Return the corpus of a configuration."""
    keys = data.ends, data.dtype, data.damaged
    return Corpus(data.source, data.path, data.val_path, data.text_key, *keys)


def documents(corpus: Corpus, begin: Position = BEGIN) -> Iterator[Document]:
    """Yield every document of data.path that is not empty, always in the same order, from `begin` on.

    Its name is for messages. One document is in memory at a time. Raises DataError that names all
    files that can't be read, when it has come to the end.
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
    """Yield the documents of a listing, and those with nothing in them, too.

    rule: how ids are read.  num_damaged: documents before `begin` that were damaged.

    From the first damaged file on, or the first document that is one more than data.damaged, they
    have nothing any more.
    """
    found = begin != BEGIN
    problems = list[str]()
    left = corpus.damaged - num_damaged
    for number, file in enumerate(listing.files[begin.files :], start=begin.files):
        within = begin if number == begin.files else Position(number)
        damages = _Damages()
        try:
            for document in _of_file(source, file, within, corpus.text_key, rule):
                if document.damage and left > 0:
                    left -= 1
                    document = document.emptied()._replace(left_out=DAMAGED)
                elif document.damage:
                    damages.add(document.damage)
                found = found or bool(document.num_bytes)
                kept = document.emptied() if problems or damages.count else document
                yield kept._replace(file=number)
        except Damaged as error:
            damages.add(error.args[0])
        except OSError as error:
            damages.add(f"{shown(file.path)} cannot be read: {error.strerror}")
        problems += damages.description
    if problems:
        raise refused(problems, source.advice.format(text_key=shown(corpus.text_key)))
    if not found:
        raise no_text(source, corpus.path, listing.left_out)


class _Damages:
    """What is wrong in one file: the first of it, and how much more."""

    def __init__(self) -> None:
        self._first = ""
        self.count = 0

    def add(self, damage: str) -> None:
        self._first = self._first or damage
        self.count += 1

    @property
    def description(self) -> list[str]:
        more = f" (and {self.count - 1:,} lines more)" * (self.count > 1)
        return [self._first + more] * bool(self.count)


def _of_file(
    source: Source, file: File, begin: Position, text_key: str, rule: TokenRule
) -> Iterator[Document]:
    """Yield the documents of a file, as its source reads it."""
    if source.choose:
        source = source.choose(file)
    if source.tokens:
        return token_documents(file, source.tokens(file, rule), begin, rule)
    if source.read is None:
        raise TypeError(f"the source {source.name} says neither how to read a file nor which ids it has")
    return source.read(file, begin, text_key)

"""The documents of a corpus: files of one source, in an order that is always the same."""

from collections.abc import Iterator
from typing import NamedTuple

from mpitrain.data.corpus_files import Listing, Paths, list_unique, no_text, refused
from mpitrain.data.source import BEGIN, SOURCES, Damaged, Document, Position, Source
from mpitrain.inputs import shown


class Corpus(NamedTuple):
    """What is trained on and validated with: the keys data.source, .path, .val_path and .text_key."""

    source: str
    path: Paths = None
    val_path: Paths = None
    text_key: str = "text"


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
    source: Source, corpus: Corpus, listing: Listing, begin: Position = BEGIN
) -> Iterator[Document]:
    """Yield the documents of a listing, and those with nothing in them, too.

    From the first file on that is damaged, they have nothing any more.
    """
    found = begin != BEGIN
    problems = list[str]()
    for number, file in enumerate(listing.files[begin.files :], start=begin.files):
        within = begin if number == begin.files else Position(number)
        try:
            for document in source.read(file, within, corpus.text_key):
                found = found or bool(document.num_bytes)
                kept = document.emptied() if problems else document
                yield kept._replace(file=number)
        except Damaged as error:
            problems.append(error.args[0])
        except OSError as error:
            problems.append(f"{shown(file.path)} cannot be read: {error.strerror}")
    if problems:
        raise refused(problems, source.advice.format(text_key=shown(corpus.text_key)))
    if not found:
        raise no_text(source, corpus.path, listing.left_out)

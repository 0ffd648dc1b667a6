"""Words of the sentences of pages.

A sentence ends with a full stop, a question or an exclamation mark, or where a paragraph or an item of
a list ends. Code, tables, headings and comments don't count.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from folders import DOCS, ROOT

MOST = 22  # words of a sentence, in the mean of a page
NOT_PROSE = (
    re.compile(r"\A---\n.*?\n---\n", re.DOTALL),
    re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"^(\||#|!\[|\(|    ).*$", re.MULTILINE),
)


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page in Markdown."""
    for other in NOT_PROSE:
        text = other.sub("\n", text)
    text = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])[*_)\"]*\s+(?=[^a-z])", paragraph.strip()):
            if sentence.strip():
                yield sentence


def words(text: str) -> list[int]:
    """Return how many words each sentence of a page has."""
    return [len(sentence.split()) for sentence in sentences(text)]


def pages() -> list[Path]:
    """Return the README and all guides."""
    folders = ("guides", "start", "tutorials", "concepts", "extending")
    return [ROOT / "README.md", *(path for name in folders for path in sorted((DOCS / name).glob("*.md")))]

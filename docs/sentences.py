"""Count the words of sentences: python docs/sentences.py [PAGE ...]; else of the README and all guides.

A sentence ends with a full stop, a question or an exclamation mark, or where a paragraph or an item of
a list ends. Code, tables, headings and comments don't count.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
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
    return [
        HERE.parent / "README.md",
        *(path for name in folders for path in sorted((HERE / name).glob("*.md"))),
    ]


def main() -> None:
    """Print the mean of each page, the longest sentence, and the mean of all."""
    every = []
    for path in [Path(name) for name in sys.argv[1:]] or pages():
        text = path.read_text()
        counted = words(text)
        every += counted
        longest = max(sentences(text), key=lambda sentence: len(sentence.split()), default="")
        if counted:
            print(f"{mean(counted):5.1f}  {max(counted):3}  {path.name}  {' '.join(longest.split())[:90]}")
    print(f"{mean(every):5.1f}  of {len(every)} sentences; at most {MOST} in the mean of a page")


if __name__ == "__main__":
    main()

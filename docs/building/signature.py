"""Find a changed digit that no command computes: the last line of a page has a digest of all such numbers.

    <!-- other numbers DIGEST -->

They are the numbers of a page that docs/build.py compares with no command, comments aside, and all of
its fragments and pictures. docs/build.py signs what it writes; who has looked at other numbers signs them by
`python docs/build.py --sign PAGE`.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LINE = re.compile(r"\s*<!-- other numbers \w+ -->\s*\Z")
COMMENT = re.compile(r"<!--.*?-->", re.S)
ATTACHED = re.compile(r"^```\{include\} (measured/\S+)$|^!\[[^]]*\]\((\S+\.svg)\)$", re.M)

Read = Callable[[Path], str]
Place = tuple[int, int]


def signed(page: Path, text: str, computed: Sequence[Place], read: Read = Path.read_text) -> str:
    """Return a page with the digest of its other numbers; without the line if it has none.

    computed: where numbers stand that are compared with a command.
    """
    numbers = " ".join(_numbers(page, text, computed, read))
    text = LINE.sub("", text).rstrip() + "\n"
    digest = hashlib.sha256(numbers.encode()).hexdigest()[:8]
    return f"{text}\n<!-- other numbers {digest} -->\n" if numbers else text


def files(page: Path, text: str) -> list[Path]:
    """Return the fragments and pictures that a page shows."""
    return [page.parent / (found[1] or found[2]) for found in ATTACHED.finditer(text)]


def without_comments(text: str) -> str:
    """Return a text with spaces for its comments: other places stay."""
    return COMMENT.sub(lambda comment: " " * len(comment[0]), text)


def _numbers(page: Path, text: str, computed: Sequence[Place], read: Read) -> Iterator[str]:
    shown = without_comments(text)
    for start, end in computed:
        shown = shown[:start] + " " * (end - start) + shown[end:]
    for each in (shown, *map(read, files(page, text))):
        yield from re.findall(r"\d+", each)

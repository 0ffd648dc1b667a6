"""Pages of Markdown: what they link to, their anchors, and their blocks of commands.

<!-- run -->                   pytest runs the block that follows, in a folder of its own
<!-- run: fails -->            its last command ends with another exit code than 0
<!-- run: MPITRAIN_DOCS -->    only with MPITRAIN_DOCS=1: it starts ranks, or takes seconds
<!-- not run: why -->
"""

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from folders import DOCS, ROOT
from launch import HERE, MPITRAIN, environment, finished, preloaded

SWITCH = "MPITRAIN_DOCS"
BLOCK = re.compile(
    r"(?:^<!-- (?P<marker>[^\n]*?) -->\n)?^```(?:sh|bash|console)\n(?P<text>.*?)^```$", re.M | re.S
)
INCLUDE = re.compile(r"^```\{include\} (\S+)\n.*?^```$", re.M | re.S)
CODE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\[[^][]*(?:\[[^][]*\][^][]*)*\]\(([^()\s]+)\)")
IN_A_CLONE = ("jobs", "docs", "examples", "tests", "benchmarks", "README.md")  # that commands name


class CommandBlock(NamedTuple):
    """Commands of a page.

    marker: the comment above them, without its brackets; "" for none.
    is_compared: whether the page shows what they print: tests/pages/test_page_outputs.py runs them.
    """

    page: str
    number: int
    marker: str
    text: str
    is_compared: bool

    @property
    def is_slow(self) -> bool:
        return self.marker.startswith("run") and SWITCH in self.marker

    @property
    def fails(self) -> bool:
        return "fails" in self.marker.split()


def pages() -> list[Path]:
    """Return all pages of the documents but those that are made."""
    made = (DOCS / "_build", DOCS / "generated")
    inside = [path for path in sorted(DOCS.rglob("*.md")) if not any(map(path.is_relative_to, made))]
    return [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "jobs/README.md")] + inside


def of_the_course(path: Path) -> bool:
    """Return whether a page is of the course, whose exercises and tables have tests of their own."""
    return path.is_relative_to(DOCS / "course")


def blocks() -> list[CommandBlock]:
    """Return the blocks of commands of all pages but the course's."""
    return [
        CommandBlock(
            str(path.relative_to(ROOT)), number, each["marker"] or "", each["text"], _is_compared(each)
        )
        for path in pages()
        if not of_the_course(path)
        for number, each in enumerate(BLOCK.finditer(path.read_text()))
    ]


def _is_compared(block: re.Match[str]) -> bool:
    """Return whether an output or a picture of a block stands below it, before the next block."""
    below = block.string[block.end() :].partition("\n```sh\n")[0]
    return re.search(r"^<!-- (output|picture)( slow)? -->$", below, re.M) is not None


def run(block: CommandBlock, folder: Path) -> str:
    """Run a block by bash in a folder of its own; return what it has printed, if it ended as it should."""
    for name in IN_A_CLONE:
        (folder / name).symlink_to(ROOT / name)
    path = f"{commands()}:{HERE}:{os.environ['PATH']}"
    command = ["bash", "-e", "-o", "pipefail", "-c", block.text]
    done = finished(command, 300, capture_output=True, text=True, cwd=folder, env=environment(PATH=path))
    printed = done.stdout + done.stderr
    assert (done.returncode != 0) == block.fails, f"{block.text}\n{done.returncode}\n{printed[-3000:]}"
    return printed


@cache
def commands() -> str:
    """Return a folder with a `mpitrain` and a `python` that have their libraries loaded already: most
    commands take a second to load them, and torch takes seconds.
    """
    folder = Path(tempfile.mkdtemp(prefix="mpitrain-test-"))
    program = "program.py"
    prefix = shlex.join(preloaded([sys.executable, program])).removesuffix(program)
    scripts = {
        "mpitrain": f'exec {shlex.join(preloaded([MPITRAIN]))} "$@"',
        "python": f'case "$1" in *.py) exec {prefix}"$@";; esac\nexec {shlex.quote(sys.executable)} "$@"',
    }
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


@cache
def whole(path: Path) -> str:
    """Return the text of a page with what it includes."""

    def included(found: re.Match) -> str:
        inside = (path.parent / found[1]).resolve()
        return whole(inside) if inside.exists() else ""

    return INCLUDE.sub(included, path.read_text())


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return what a link to a page may name after #: its headings, as GitHub and Sphinx write them, and
    its targets.
    """
    text = whole(path)
    targets = re.findall(r"^\(([^()\s]+)\)=$", text, re.M)
    headings = [re.sub(r"[`*]", "", each) for each in re.findall(r"^#+ (.+)$", CODE.sub("", text), re.M)]
    ids = [re.sub(r"[^a-z0-9]+", "-", each.lower()).strip("-") for each in headings]
    on_github = [re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings]
    return frozenset([*targets, *ids, *on_github])


def links(path: Path) -> Iterator[str]:
    """Yield the links of a page to other pages and files of the tree."""
    text = CODE.sub("", path.read_text())
    return (link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link))

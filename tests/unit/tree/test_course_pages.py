"""Each page of docs/course/ has its parts, and what it names is there.

A formula worked out with numbers, a program, a picture or why there is none, a measured table with its
date and commands, files to read, an exercise whose answer is a test, and what was learned. Fragments name
commands that parse; sentences are short.
"""

import re
import shlex
import sys
from statistics import mean

import pytest
import sentences
from folders import ROOT

COURSE = ROOT / "docs" / "course"

HEADINGS = [
    "The idea",
    "The formula",
    "The program",
    "The picture",
    "What it costs and saves",
    "The file to read",
    "Exercise",
    "What was learned",
]
FENCE = re.compile(r"```(\{?[\w-]*\}?)([^\n]*)\n(.*?)```", re.DOTALL)
INCLUDE = re.compile(r"```\{include\} (\S+)")
PICTURE = re.compile(r"!\[([^\]]+)\]\((\S+)\)")
REPOSITORY_FILE = re.compile(r"`((?:mpitrain|comm|schedules|docs|tests)/[\w./-]+)`")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
MEASURED = re.compile(r"^\*.* cores .*torch \S+, .*, \d{4}-\d\d-\d\d\.\*$", re.MULTILINE)
WITH_TABLE = re.compile(r"^\|( -+:? \|| -+ \|)+$", re.MULTILINE)
KEY = re.compile(r"`([a-z]+\.[a-z_0-9]+)`")
PARAGRAPHS = range(2, 4)  # of an idea
SENTENCES = range(1, 6)  # of a paragraph
LEARNED = range(2, 5)  # items
ROW = re.compile(
    r"^\| (?P<quantity>[^|]+) \| [^|]+ \| (?P<result>[\d.,e-]+) \| (?P<printed>[\d.,e-]+) \|$", re.M
)
FARTHEST = 0.06  # a formula leaves out pads, and that the first stage has the embedding


def pages():
    sys.path.insert(0, str(COURSE))
    try:
        from measuring.report import PAGES
    finally:
        sys.path.remove(str(COURSE))
    return PAGES


PAGES = pages()
FRAGMENTS = sorted((COURSE / "measured").rglob("*.md"))


def sections(page):
    """Return {heading: text} of a page."""
    found = re.split(r"^## (.+)$", (COURSE / f"{page}.md").read_text(), flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_its_parts_in_order(page):
    found = sections(page)
    assert list(found) == HEADINGS
    paragraphs = found["The idea"].strip().split("\n\n")
    assert len(paragraphs) in PARAGRAPHS
    assert all(len(sentences.words(paragraph)) in SENTENCES for paragraph in paragraphs)
    assert "```math" in found["The formula"] and "/worked.md" in found["The formula"]
    assert len(re.findall(r"^- ", found["What was learned"], re.M)) in LEARNED
    assert INCLUDE.search(found["The program"]) or "```" in found["The program"]
    pictures = PICTURE.findall(found["The picture"])
    assert pictures or found["The picture"].strip().startswith("No picture:")
    tables = [COURSE / name for name in INCLUDE.findall(found["What it costs and saves"])]
    assert any(WITH_TABLE.search(table.read_text()) for table in tables)


@pytest.mark.parametrize("page", PAGES)
def test_a_formula_gives_what_mpitrain_prints(page):
    """tests/pages/test_page_outputs.py compares both columns with what is printed now."""
    rows = list(ROW.finditer((COURSE / "measured" / page / "worked.md").read_text()))
    assert rows
    for row in rows:
        result, printed = (float(row[name].replace(",", "")) for name in ("result", "printed"))
        assert result == pytest.approx(printed, rel=FARTHEST), row["quantity"]


@pytest.mark.parametrize("page", [*PAGES, "index"])
def test_what_a_page_names_is_there(page):
    text = (COURSE / f"{page}.md").read_text()
    for name in INCLUDE.findall(text) + [path for _, path in PICTURE.findall(text)]:
        assert (COURSE / name).is_file(), name
    for name in REPOSITORY_FILE.findall(text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\((\w+\.md)\)", text):
        assert (COURSE / name).is_file(), name


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_a_file_to_read_and_an_exercise_with_a_test(page):
    found = sections(page)
    assert REPOSITORY_FILE.search(found["The file to read"])
    answers = TEST.findall(found["Exercise"])
    assert answers
    for file, test in answers:
        assert f"def {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"


@pytest.mark.parametrize("page", [*PAGES, "index"])
def test_keys_are_those_of_the_configuration(page):
    from mpitrain.config import Config, flatten

    tables = {key.partition(".")[0] for key in flatten(Config())}
    named = [
        key for key in KEY.findall((COURSE / f"{page}.md").read_text()) if key.partition(".")[0] in tables
    ]
    unknown = set(named) - set(flatten(Config()))
    assert not {key for key in unknown if not key.endswith((".py", ".svg", ".md", ".toml", ".json"))}


@pytest.mark.parametrize("page", [*PAGES, "index"])
def test_sentences_are_short_in_the_mean(page):
    found = mean(sentences.words((COURSE / f"{page}.md").read_text()))
    assert found <= sentences.MOST, f"{found:.1f} words"


def test_the_map_names_every_page():
    index = (COURSE / "index.md").read_text()
    tree = FENCE.search(index)[3].split()[2:]
    assert tree == list(PAGES)
    assert set(re.findall(r"\]\((\w+)\.md\)", index)) == set(PAGES)


# ---------------------------------------------------------------------------------- what is generated


@pytest.mark.parametrize("page", PAGES)
def test_every_fragment_and_picture_is_shown_by_its_page(page):
    text = (COURSE / f"{page}.md").read_text()
    made = {str(path.relative_to(COURSE)) for path in (COURSE / "measured" / page).iterdir()}
    assert made == set(INCLUDE.findall(text)) | {path for _, path in PICTURE.findall(text)}


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_fragment_says_how_it_was_made_and_its_commands_parse(fragment):
    text = fragment.read_text()
    made = rf"<!-- Made by: python docs/build.py (--measure )?{fragment.parent.name} -->"
    is_measured = re.match(made, text)[1] is not None
    joined = re.sub(r" \\\n +", " ", text)
    lines = [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
    assert lines
    if WITH_TABLE.search(text) and is_measured:
        assert MEASURED.search(text), "a table says machine and date"
    for line in lines:
        parse(shlex.split(line))


def parse(words):
    """Parse a command as click and the configuration do; run nothing."""
    if words[0] == "mpirun":
        words = words[3:]
    if words[0] == "python":
        assert (ROOT / words[1]).is_file()
        return
    from mpitrain import config
    from mpitrain.cli import cli

    assert words[0] == "mpitrain"
    name, rest = words[1], words[2:]
    group = cli.commands[name]
    while hasattr(group, "commands"):
        group, rest = group.commands[rest[0]], rest[1:]
    given = group.make_context(name, list(rest)).params
    if "overrides" in given:
        path = given.get("config") or given.get("path")
        config.load(ROOT / path if path else None, given["overrides"])

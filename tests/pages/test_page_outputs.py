"""Outputs, tables, figures and pictures of the pages are what their commands print now (docs/build.py).

A block of output that is neither computed nor marked as measured is refused. Wrong digits are planted on
pages, in their fragments and in their pictures, and found. Commands that take long are compared with
MPITRAIN_DOCS=1.
"""

import os
import random
import re
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest
from conftest import WITH_LONG
from pages import DOCS, ROOT, SWITCH, commands

sys.path.append(str(DOCS))
import build

SLOW = os.environ.get(SWITCH) == "1"
WHEN = build.COMPUTED if SLOW else ["fast"]
PLANTED = 400 if WITH_LONG else 40  # wrong digits
IN_PICTURE = re.compile(r">[^<>]*\d[^<>]*</(?:text|title)>")
FENCE = re.compile(r"(?P<above>^[^\n]*\n)(?P<gap>\n?)^```text\n(?P<inside>.*?)^```$", re.M | re.S)
MARKED = re.compile(
    r"<!-- (output|measured|example: \S|held by: (?P<test>tests/\S+\.py)).*-->"
    r"|(?!<!--).* -->"  # the end of a marker of several lines
)
DIGIT = re.compile(r"\d")
DATED = re.compile(r"^(numbers: .*|\*Measured: .*)\d{4}-\d\d-\d\d.*`.+`|^numbers: .* beside (it|them)", re.M)
TABLE = re.compile(r"(?P<above>[^\n]*\n\s*)(?P<table>(?:^\|[^\n]*\n)+)", re.M)


def name_of(page):
    return str(page.relative_to(ROOT))


@cache
def run():
    """Return what runs a command once, with libraries loaded already."""
    return cache(partial(build.plain_run, programs=commands()))


PAGES = [
    page for page in build.pages() if any(output.when in WHEN for output in build.outputs(page.read_text()))
]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_says_what_its_commands_print(page):
    found = build.differences(page, run(), when=WHEN)
    assert not found, "\n".join(["python docs/build.py writes it:", *map(str, found)])


@pytest.mark.parametrize("name", build.PAGES)
def test_a_page_of_the_course_says_what_its_commands_print(name):
    found = build.course_differences(name, run(), slow=SLOW)
    assert not found, "\n".join([f"python docs/build.py {name} writes it:", *map(str, found)])


@pytest.mark.parametrize("page", build.pages(), ids=name_of)
def test_an_output_is_computed_or_marked_as_measured(page):
    text = page.read_text()
    for block in FENCE.finditer(text):
        found = MARKED.match(block["above"])
        assert found, f"{name_of(page)}: neither computed nor marked as measured:\n{block[0]}"
        assert not found["test"] or (ROOT / found["test"]).is_file(), found["test"]
    if "\n<!-- measured" in text and text.startswith("---"):
        assert DATED.search(text), f"{name_of(page)}: no machine, date and command of what was measured"


def digits(path, text):
    """Return where a reader sees digits: not in comments, of a picture in its texts."""
    if path.suffix == ".svg":
        return [
            found.start() + at.start()
            for found in IN_PICTURE.finditer(text)
            for at in DIGIT.finditer(found[0])
        ]
    return [found.start() for found in DIGIT.finditer(build.signature.without_comments(text))]


def with_another_digit(place, text, other):
    return text[:place] + str((int(text[place]) + other) % 10) + text[place + 1 :]


def what_finds(page, path, text):
    """Return what finds that a file of a page has another text: "signature", "command", or ""."""

    def read(file):
        return text if file == path else Path.read_text(file)

    if build.signed(page, read) != read(page):
        return "signature"
    return "command" if build.differences(page, run(), when=WHEN, read=read) else ""


def test_wrong_digits_at_random_places_are_found():
    chance, all_pages = random.Random(PLANTED), build.pages()
    counted, missed = Counter(), []
    while counted.total() < PLANTED:
        page = chance.choice(all_pages)
        files = [page, *build.signature.files(page, page.read_text())]
        places = [(path, place) for path in files for place in digits(path, path.read_text())]
        if places:
            path, place = chance.choice(places)
            text = with_another_digit(place, path.read_text(), chance.randrange(1, 10))
            counted[found := what_finds(page, path, text)] += 1
            if not found:
                missed.append(f"{name_of(path)}: {text[max(place - 60, 0) : place + 20]!r}")
    print(f"of {PLANTED} wrong digits are found by", dict(counted))
    assert not missed, "\n".join(missed)


def test_a_wrong_digit_is_found_in_every_output():
    missed = []
    for page in PAGES:
        text = page.read_text()
        for output in build.outputs(text):
            if output.when not in WHEN or output.kind == "picture":
                continue
            start, end = output.start, output.end
            if output.kind == "figures":
                start, end = build.figure_places(text, output)[0]
            places = [place for place in range(start, end) if text[place].isdigit()]
            if places and not what_finds(page, page, with_another_digit(places[-1], text, 1)):
                missed.append(f"{name_of(page)}:{output.line}")
    assert not missed


# ---------------------------------------------------------------------------------- the notation

PAGE = """# A page

```sh
printf '%s\\n' 'one 1' 'two 2' 'three 3'
```

<!-- output -->
```text
one 1
...
three 4
```

<!-- figures: "there are {} and
     {}" echo 7 8.5 -->
Of them there are 7
and 8.4 left.

<!-- output: printf '|a|\\n|-|\\n|1|\\n' -->
|a|
|-|
|2|
"""


def as_signed(text):
    """Return what reads a text, with its signature, in place of a page."""
    text = build.signature.signed(ROOT / "README.md", text, build.computed(text))
    return lambda _: text


def test_a_page_is_rewritten():
    page = ROOT / "README.md"  # stands for a page: nothing is written
    found = build.differences(page, build.plain_run, read=as_signed(PAGE))
    assert [(each.line, each.now) for each in found] == [
        (7, "one 1\n...\nthree 3\n"),
        (14, "Of them there are 7\nand 8.5 left."),
        (19, "|a|\n|-|\n|1|\n"),
    ]


def test_a_line_that_is_printed_no_more_is_said():
    read = as_signed(PAGE.partition("<!-- fig")[0])
    (found,) = build.differences(ROOT / "README.md", lambda _: "other\n", read=read)
    assert "no line like 'one 1' is printed now" in found.now


def test_a_line_between_two_shown_ones_is_not_left_out():
    assert build.with_gaps(["a 1", "c 1", "..."], ["a 2", "b 2", "c 2", "d"]) == ["a 2", "b 2", "c 2", "..."]


def test_a_text_of_figures_that_stands_nowhere_is_said():
    text = PAGE.replace("there are 7", "there is 7")
    found = build.differences(ROOT / "README.md", lambda _: "3", read=lambda _: text)
    assert "has to stand in the paragraph below" in "".join(each.now for each in found)


def test_a_marker_above_nothing_is_refused():
    with pytest.raises(ValueError, match="line 1: nothing stands below"):
        list(build.outputs("<!-- output: true -->\nText.\n"))


# -------------------------------------------------------------------- comments of configurations

COMMENTS = {
    "docs/course/small.toml": '"course: {} M parameters, {} blocks of width {}, {} sequences of {} tokens"'
    " = sizes({path})",
    "docs/course/llama3-8b.toml": '"A model of {} billion parameters" = sizes({path})[0] / 1000',
    "jobs/tiny.toml": '"A model of {} M parameters" = sizes({path})[0]',
    "jobs/tiny-mixtral.toml": '"{} experts, of which a token meets {}." = experts({path})',
}


@pytest.mark.parametrize("path", COMMENTS)
def test_comments_of_configurations_are_true(path):
    comment = "\n".join(re.findall(r"^# (.*)", (ROOT / path).read_text(), re.M))
    marker = COMMENTS[path].replace("{path}", f'"{path}"')
    assert build.figures(comment, marker, build.plain_run) == comment

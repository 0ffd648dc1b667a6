"""Write what the pages say from the commands that print it, and compare it.

    python docs/build.py [PAGE ...]            write every computed output anew
    python docs/build.py --check [PAGE ...]    name those that differ; exit code 1
    python docs/build.py --sign PAGE ...       write the digest of the numbers that nothing computes
    python docs/build.py --list [PAGE ...]     show these numbers
    python docs/build.py --measure PAGE ...    write what was measured anew: it trains for minutes

A page marks an output above it:

    <!-- output -->                          the block below is what the commands above it print
    <!-- output: COMMAND -->                 the block or table below is what COMMAND prints
    <!-- picture: COMMAND -->                the picture below is what COMMAND --out FILE draws
    <!-- figures:
    "holds {} GB" COMMAND                   in the paragraph or table below, {} is a word that COMMAND prints
    "holds {} GB" = EXPRESSION -->          a line for each text; its numbers have the digits of the page
    <!-- measured -->                       a clock or chance decides; the page's `numbers:` has machine, date
                                            and command
    <!-- measured: COMMAND -->              the same, and --measure writes the table or draws the picture
    <!-- example: WHY -->                    no output: a file, or a message with names that are made up
    <!-- held by: TEST -->                   a test of that path compares it

EXPRESSION is Python over docs/building/figures.py, in this process; `output: = EXPRESSION` is text of it.
`output slow`, `figures slow` and `picture slow` are compared with MPITRAIN_DOCS=1 alone. In a block a line
`...` stands for lines that are left out, and a line above 110 columns is cut and ends with ` ...`. Commands
run by bash in an empty folder with links to jobs, docs, examples, tests and benchmarks. The course has
fragments in docs/course/measured; those that `compute` of docs/course/measuring/pages writes are compared.
The last line of a page is its signature (docs/building/signature.py), which finds any other changed digit.
"""

import difflib
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
COURSE = DOCS / "course"
sys.path += [str(DOCS), str(COURSE)]
from building import figures as values  # noqa: E402
from building import signature  # noqa: E402
from measuring.report import CUT, MORE_RANKS_THAN_CORES, PAGES, Report, cut  # noqa: E402

FOLDERS = ("jobs", "docs", "examples", "tests", "benchmarks")
COMPUTED = ("fast", "slow")
WIDTH = 110
GAP = "..."
MIN_SIMILARITY = 0.5  # of a line and the one that it becomes
MARKER = re.compile(
    r"^<!-- (?P<kind>output|figures|picture|measured)(?P<slow> slow)?(?:: ?(?P<command>.*?))? -->\n",
    re.M | re.S,
)
BLOCK = re.compile(r"```\w*\n(?P<inside>.*?)^```$|(?P<table>(?:^\|[^\n]*\n?)+)", re.M | re.S)
IMAGE = re.compile(r"!\[[^]]*\]\((?P<path>[^)]+)\)")
COMMANDS = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```$", re.M | re.S)
FIGURES = re.compile(r'"(?P<text>[^"]*\{\}[^"]*)" (?P<command>.+)', re.S)
TEXT_OF_FIGURES = re.compile(r'^ *"[^"]*\{\}.*?(?=\n *"|\Z)', re.M | re.S)
NUMBER = r"([\d.,]+\d|\d)"
ENVIRONMENT = {**MORE_RANKS_THAN_CORES, "COLUMNS": "", "CUDA_VISIBLE_DEVICES": ""}

SIGN = "where these are right (git diff says which changed): python docs/build.py --sign"

Run = Callable[[str], str]


class Difference(NamedTuple):
    """page: from the repository's top.  line: of the marker."""

    page: str
    line: int
    was: str
    now: str

    def __str__(self) -> str:
        lines = difflib.unified_diff(
            self.was.splitlines(), self.now.splitlines(), "page", "command", "", "", 0
        )
        return "\n".join([f"{self.page}:{self.line}", *list(lines)[2:]])


class Output(NamedTuple):
    """A computed part of a page.

    command: what prints it.  when: it is written: "fast" and "slow" each time, "measured" by --measure.
    start, end: of the text that is written.  line: of its marker.
    """

    kind: str
    command: str
    when: str
    line: int
    start: int
    end: int


def pages() -> list[Path]:
    """Return all pages but those that are written as a whole."""
    made = (DOCS / "_build", DOCS / "generated", COURSE / "measured")
    inside = [path for path in sorted(DOCS.rglob("*.md")) if not any(map(path.is_relative_to, made))]
    return [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "jobs/README.md")] + inside


def outputs(text: str) -> Iterator[Output]:
    """Yield the computed parts of a page. Raises ValueError for a marker above nothing."""
    for marker in MARKER.finditer(text):
        line = text.count("\n", 0, marker.start()) + 1
        command = " ".join((marker["command"] or "").split())
        below = text[marker.end() :]
        kind = marker["kind"]
        if kind == "measured" and not command:
            continue
        when = "measured" if kind == "measured" else "slow" if marker["slow"] else "fast"
        if kind == "figures":
            end = marker.end() + len(_paragraph(below, 0))
            for pair in TEXT_OF_FIGURES.finditer(marker["command"]):
                at = text.count("\n", 0, marker.start("command") + pair.start()) + 1
                yield Output("figures", " ".join(pair[0].split()), when, at, marker.end(), end)
            continue
        image, found = IMAGE.match(below), BLOCK.match(below) or IMAGE.match(below)
        if found is None:
            raise ValueError(f"line {line}: nothing stands below {marker[0].strip()}")
        kind = "picture" if image else "output"
        group = next(name for name, value in found.groupdict().items() if value is not None)
        start, end = found.span(group)
        if not command:
            command = re.sub(r" --out \S+$", "", COMMANDS.findall(text[: marker.start()])[-1].strip())
        yield Output(kind, command, when, line, marker.end() + start, marker.end() + end)


def computed(text: str) -> list[signature.Place]:
    """Return where numbers stand that are compared with a command each time."""
    places = []
    for output in outputs(text):
        if output.kind == "figures" and output.when == "fast":
            with suppress(ValueError):  # of a text that doesn't stand there: differences() says so
                places += figure_places(text, output)
        elif output.kind == "output" and output.when == "fast":
            places.append((output.start, output.end))
    return places


def signed(page: Path, read: signature.Read = Path.read_text) -> str:
    """Return a page with the digest of the numbers that are not computed."""
    text = read(page)
    return signature.signed(page, text, computed(text), read)


def plain_run(command: str, programs: str = "") -> str:
    """Run commands by bash in an empty folder; return what they print. Raises RuntimeError with it.

    command: or `= EXPRESSION`.  programs: a folder that is searched first.
    """
    if command.startswith("= "):
        return values.evaluated(command[2:])
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        for name in FOLDERS:
            (Path(folder) / name).symlink_to(ROOT / name)
        path = os.pathsep.join(filter(None, [programs, str(Path(sys.executable).parent), os.environ["PATH"]]))
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=folder,
            env={**os.environ, **ENVIRONMENT, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


def block(was: str, printed: str) -> str:
    """Return a block as printed now, with the gaps and cuts that it has."""
    shown = [line.rstrip() for line in was.splitlines()]
    new = [line.rstrip() for line in printed.rstrip().splitlines()]
    if shown[:1] and shown[0].startswith("|"):
        return "\n".join(new) + "\n"
    if GAP in shown:
        new = with_gaps(shown, new)
    return "".join(f"{cut(line)}\n" for line in new)


def with_gaps(shown: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the printed lines from the first to the last of each part between two gaps."""
    lines: list[str] = []
    part: list[str] = []
    begin = 0
    for line in [*shown, GAP]:
        if line != GAP:
            part.append(line)
            continue
        if part:
            first = most_similar(part[0], new, begin)
            last = most_similar(part[-1], new, first + len(part) - 1) if len(part) > 1 else first
            lines += new[first : last + 1]
            begin = last + 1
        lines.append(GAP)
        part = []
    return lines[:-1]


def most_similar(line: str, new: Sequence[str], begin: int) -> int:
    """Return the place of the line that is most like one, numbers aside. Raises ValueError without any."""
    likeness = [_likeness(line.removesuffix(CUT), other) for other in new[begin:]]
    best = max(likeness, default=0.0)
    if best < MIN_SIMILARITY:
        raise ValueError(f"no line like {line!r} is printed now: write the block anew")
    return begin + likeness.index(best)


@cache
def _likeness(line: str, other: str) -> float:
    masked = [re.sub(r"[\d.,]+", "0", " ".join(each.split())) for each in (line, other[: len(line) + 20])]
    exact = 0.01 * (line == other[: len(line)])
    return difflib.SequenceMatcher(None, *masked, autojunk=False).ratio() + exact


def figures(paragraph: str, marker: str, run: Run) -> str:
    """Return a paragraph with the figures that a command prints now."""
    found = _figures(marker)
    words = run(found["command"]).split()
    places = _places(paragraph, found["text"])
    if len(words) != len(places):
        raise ValueError(
            f"{found['text']!r} needs {found['text'].count('{}')} figures, the command prints {words}"
        )
    is_value = found["command"].startswith("= ")
    for (start, end), word in reversed(list(zip(places, words, strict=True))):
        shown = _as_shown(paragraph[start:end], word) if is_value else word
        paragraph = paragraph[:start] + shown + paragraph[end:]
    return paragraph


def _as_shown(was: str, value: str) -> str:
    """Return a value with as many digits after the point as a number has that stands there."""
    if value.count(".") > 1:
        return value  # a version
    digits = len(was.partition(".")[2])
    separator = "," if "," in was or float(was) < 1000 else ""
    return f"{float(value):{separator}.{digits}f}"


def figure_places(text: str, output: Output) -> list[tuple[int, int]]:
    """Return where the figures of a marker stand in a page."""
    found = _places(text[output.start : output.end], _figures(output.command)["text"])
    return [(output.start + start, output.start + end) for start, end in found]


def _figures(marker: str) -> re.Match[str]:
    found = FIGURES.fullmatch(marker)
    if found is None:
        raise ValueError(f'needed "text with {{}}" and a command, not {marker}')
    return found


def _places(paragraph: str, text: str) -> list[tuple[int, int]]:
    """Return where the figures of a text stand in a paragraph."""
    texts = text.split("{}")
    pattern = NUMBER.join(r"\s+".join(map(re.escape, re.split(r"\s+", each))) for each in texts)
    place = re.search(pattern, paragraph)
    if place is None:
        raise ValueError(f"{text!r} has to stand in the paragraph below")
    return [place.span(number) for number in range(1, len(texts))]


def differences(
    page: Path,
    run: Run,
    *,
    when: Sequence[str] = COMPUTED,
    write: bool = False,
    read: signature.Read = Path.read_text,
) -> list[Difference]:
    """Return where a page differs from what its commands print now, and from its signature.

    when: which outputs.  write: them into the page.  read: texts of pages, if not as they are on disk.
    """
    name = str(page.relative_to(ROOT))
    was = now = read(page)
    found = []
    if signed(page, read) != was:
        found.append(
            Difference(name, was.count("\n"), "its signature is of other numbers\n", f"{SIGN} {name}\n")
        )
    for output in reversed(list(outputs(was))):  # from the end, so that places stay
        if output.when not in when:
            continue
        if output.kind == "picture":
            found += _picture(page, output, read, run, write)
            continue
        old = was[output.start : output.end] if output.kind != "figures" else _paragraph(now, output.start)
        new, error = _printed_now(output, old, run)
        if new != old or error:
            found.append(Difference(name, output.line, old, error or new))
            now = now[: output.start] + new + now[output.start + len(old) :]
    if write and now != was:
        page.write_text(now)
    return found[::-1]


def _printed_now(output: Output, old: str, run: Run) -> tuple[str, str]:
    """Return the computed part of a page, and why it can't be computed."""
    try:
        if output.kind == "figures":
            return figures(old, output.command, run), ""
        return block(old, run(output.command)), ""
    except (ValueError, RuntimeError) as error:
        return old, f"{error}\n"


def _paragraph(text: str, start: int) -> str:
    return re.split(r"\n\s*\n", text[start:].rstrip(), maxsplit=1)[0]


def _picture(page: Path, output: Output, read: signature.Read, run: Run, write: bool) -> list[Difference]:
    path = (page.parent / read(page)[output.start : output.end]).resolve()
    drawn = run(f"{output.command} --out picture.svg > printed && cat picture.svg")
    was = read(path) if path.exists() else ""
    if _same_drawing(was, drawn):
        return []
    if write:
        path.write_text(drawn)
    return [Difference(str(page.relative_to(ROOT)), output.line, f"{path.name}: {len(was)}", f"{len(drawn)}")]


def _same_drawing(one: str, other: str) -> bool:
    """Return whether two pictures show the same: texts, and places if one matplotlib drew both."""
    versions = {tuple(re.findall(r"Matplotlib v([\d.]+)", svg)) for svg in (one, other)}
    texts, places = zip(*map(_drawing, (one, other)), strict=True)
    return texts[0] == texts[1] and (len(versions) > 1 or places[0] == places[1])


def _drawing(svg: str) -> tuple[list[str], list[float]]:
    numbers = re.findall(r"-?\d+\.?\d*", " ".join(re.findall(r' (?:d|x|y|width|height)="([^"]*)"', svg)))
    return re.findall(r">([^<>\n]+)</(?:text|title)>", svg), [round(float(number), 1) for number in numbers]


# ---------------------------------------------------------------------------------- the course


def course_differences(
    name: str, run: Run, *, slow: bool = True, write: bool = False, read: signature.Read = Path.read_text
) -> list[Difference]:
    """Return the computed fragments of a page of the course that differ from what commands print now."""
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        out = Path(folder) / "out"
        report = Report(Path(folder), name, out, run, slow=slow)
        importlib.import_module(f"measuring.pages.{name}").compute(report)
        found = []
        for path in sorted(out.iterdir()):
            kept = COURSE / "measured" / name / path.name
            was, now = (read(file) if file.exists() else "" for file in (kept, path))
            if not (_same_drawing(was, now) if path.suffix == ".svg" else was == now):
                found.append(Difference(f"docs/course/measured/{name}/{path.name}", 1, was, now))
                if write:
                    kept.write_text(now)
    return found


def measure(name: str) -> None:
    """Measure a page of the course, as a user in the root of a clone would."""
    page = importlib.import_module(f"measuring.pages.{name}")
    with tempfile.TemporaryDirectory(prefix="course-") as folder:
        if hasattr(page, "measure"):
            page.measure(Report(Path(folder), name, COURSE / "measured" / name))


def main(words: Sequence[str]) -> int:
    """Write, check, sign, list or measure; return the exit code."""
    options = {word for word in words if word.startswith("--")}
    named = [word for word in words if word not in options]
    by_name = options & {"--measure", "--sign"}
    if options - {"--check", "--list", *by_name} or (by_name and not named):
        print(__doc__)
        return 2
    chosen = [
        page for page in pages() if not named or any(word in str(page.relative_to(ROOT)) for word in named)
    ]
    if "--list" in options:
        print(*(line for page in chosen for line in other_numbers(page)), sep="\n")
        return 0
    are_signed = [page for page in chosen if "--sign" in options or signed(page) == page.read_text()]
    if "--measure" in options:
        measure_pages(chosen)
    elif "--sign" not in options:
        found = compare(chosen, write="--check" not in options)
        print(*found, sep="\n")
        if "--check" in options:
            return int(bool(found))
    for page in are_signed:  # what was written here is known
        page.write_text(signed(page))
    return int(len(are_signed) < len(chosen))


def compare(chosen: Sequence[Path], *, write: bool) -> list[Difference]:
    """Return where pages and their fragments differ from their commands."""
    run = cache(plain_run)
    found = []
    for page in chosen:
        found += differences(page, run, write=write)
        if page.parent == COURSE and page.stem in PAGES:
            found += course_differences(page.stem, run, write=write)
    return found


def measure_pages(chosen: Sequence[Path]) -> None:
    """Measure what commands of pages measure."""
    for page in chosen:
        print(page.relative_to(ROOT), flush=True)
        print(*differences(page, plain_run, when=["measured"], write=True), sep="\n")
        if page.parent == COURSE and page.stem in PAGES:
            measure(page.stem)


def other_numbers(page: Path) -> Iterator[str]:
    """Yield the lines of a page with numbers that nothing computes: computed ones are left out."""
    text = page.read_text()
    shown = signature.without_comments(text)
    for start, end in computed(text):
        shown = shown[:start] + re.sub(r"\d", "#", shown[start:end]) + shown[end:]
    for number, line in enumerate(shown.splitlines(), 1):
        if re.search(r"\d", line):
            yield f"{page.relative_to(ROOT)}:{number}: {line}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

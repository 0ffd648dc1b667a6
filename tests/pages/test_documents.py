"""The documents: links, commands, sentences, terms, and lists that must be whole."""

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import sentences
from pages import DOCS, ROOT, SWITCH, anchors, blocks, links, of_the_course, pages, run, whole

from mpitrain.schedules.catalog import NAMES

sys.path.append(str(DOCS))
from building import reference

MOST_BYTES = 10_240  # of the README
LEAST_QUESTIONS = 40
MOST_COLUMNS = 116  # of a block: what a page shows at 1280 pixels without a scroll bar
LEAST_OF_A_MESSAGE = 7  # characters
TERMS = [
    "gradient accumulation",
    "prefetch",
    "reshard",
    "activation recomputation",
    "activation checkpointing",
    "load balancing",
    "mixed precision",
    "loss scaling",
    "master weights",
    "gradient clipping",
    "weight decay",
    "optimizer state",
    "sequence parallel",
    "context parallel",
    "pipeline parallel",
    "expert parallel",
    "data parallel",
    "ring attention",
    "sliding window",
    "key-value cache",
    "topology",
    "oversubscription",
    "straggler",
    "deadlock",
    "silent data corruption",
    "dropless",
    "capacity factor",
    "CUDA-aware",
    "NUMA",
    "HSDP",
    "FSDP",
]
OLD_HEADINGS = (
    "Start", "Your own text", "A step is a program", "Schedules", "What communication costs",
    "Hundreds of ranks on one machine", "Where things are", "Memory and precision", "Mixtures of experts",
    "Checkpoints", "Running on your cluster", "On GPUs", "What can go wrong, and what you will see",
    "When numbers go wrong", "Tests on N ranks", "What is trusted", "Sharp edges",
)  # fmt: skip
PAGES = pages()
SITE = [path for path in PAGES if path.is_relative_to(DOCS)]
FAST = [
    block for block in blocks() if block.marker.startswith("run") and not (block.is_slow or block.is_compared)
]


@pytest.fixture(scope="module", autouse=True)
def _reference_pages():
    """Pages that are made from the source have anchors, too."""
    reference.write(DOCS / "generated")


def name_of(path):
    return str(path.relative_to(ROOT))


def rows(page):
    """Return the cells of the rows of a page's tables, without their heads."""
    found = [
        line.strip("| \n").split(" | ") for line in page.read_text().splitlines() if line.startswith("|")
    ]
    return [cells for cells in found if not set("".join(cells)) <= set("-|")]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_pages_and_anchors(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{name_of(page)} links to {link}"
        if anchor and path.name != "configuration.md":  # whose targets are made, as test_reference.py asks
            assert anchor in anchors(path), (
                f"{name_of(page)} links to {link}; there are {sorted(anchors(path))}"
            )


@pytest.mark.parametrize("page", SITE, ids=name_of)
def test_every_page_has_an_owner_and_is_in_the_table_of_contents(page):
    if of_the_course(page):
        return
    found = re.match(r"---\nowner: (.+)\nnumbers: (.+)\n---\n", page.read_text())
    assert found, name_of(page)
    assert not re.search(r": |^[`\"'*&!%@]", found[2]), f"{name_of(page)}: not YAML: {found[2]}"
    assert all((ROOT / owner).exists() for owner in found[1].split(", ")), f"{name_of(page)}: {found[1]}"
    contents = (DOCS / "index.md").read_text()
    name = str(page.relative_to(DOCS).with_suffix(""))
    assert name == "index" or f"\n{name}\n" in contents, name


def test_every_block_of_commands_is_run_or_says_why_not():
    markers = re.compile(rf"run(: ({SWITCH}|fails|{SWITCH} fails))?|not run: \S.*")
    unmarked = [block for block in blocks() if not markers.fullmatch(block.marker)]
    assert not unmarked, "\n".join(f"{block.page}, block {block.number}: {block.text}" for block in unmarked)
    assert len(blocks()) > 60


FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<inside>.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_is_cut_at_1280_pixels(page):
    for block in FENCE.finditer(page.read_text()):
        assert block["kind"].startswith("{") or max(map(len, block["inside"].split("\n"))) <= MOST_COLUMNS


@pytest.mark.parametrize("block", FAST, ids=lambda block: f"{block.page}-{block.number}")
def test_commands_of_a_page_run(block, tmp_path):
    run(block, tmp_path)


def test_the_readme_is_two_screens():
    assert len((ROOT / "README.md").read_bytes()) <= MOST_BYTES


@pytest.mark.parametrize("page", sentences.pages(), ids=name_of)
def test_sentences_are_short(page):
    counted = sentences.words(page.read_text())
    assert counted and mean(counted) <= sentences.MOST, mean(counted)


def test_sentences_are_counted():
    text = (
        "---\nowner: x\nnumbers: none\n---\n# A head\nOne two. Three `four` five!\n\n- six\n- seven eight\n"
    )
    assert sentences.words(text) == [2, 3, 1, 2]
    assert sentences.words("```sh\na b c. D\n```\n| a | b. C |\nNine, ten (see `x.y`) and [on](a.md).\n") == [
        6
    ]


@pytest.mark.parametrize("term", TERMS)
def test_a_term_of_the_field_stands_in_the_documents(term):
    assert any(term.lower() in " ".join(whole(page).lower().split()) for page in SITE)


def test_questions_are_many_and_each_has_a_page():
    questions = rows(DOCS / "questions.md")[1:]
    assert len(questions) >= LEAST_QUESTIONS
    assert not [cells for cells in questions if not re.fullmatch(r"\[.+\]\(\S+\)", cells[1])]


def test_every_word_of_the_glossary_leads_to_a_page_and_stands_once():
    cells = [row for row in rows(DOCS / "reference" / "glossary.md") if row[0] != "you search"]
    assert not [row for row in cells if len(row) != 3 or "](" not in row[2]]
    words = [word.lower() for row in cells for word in row[0].split(", ")]
    assert not {word for word in words if words.count(word) > 1}


def test_nothing_of_the_old_readme_is_lost():
    found = [cells[0] for cells in rows(DOCS / "from-the-old-readme.md")]
    assert not set(OLD_HEADINGS) - set(found)


def test_every_schedule_has_a_paper_and_a_picture():
    assert set(reference.PAPERS) == set(NAMES)
    sources = "".join(path.read_text() for path in (ROOT / "schedules" / "families").glob("*.py"))
    ids = re.findall(r"\d{4}\.\d{5}", "".join(reference.PAPERS.values()))
    assert not [each for each in ids if f"arXiv:{each}" not in sources]
    gallery = (DOCS / "gallery.md").read_text()
    for name in NAMES:
        assert f"pictures/{name}.svg" in gallery and (DOCS / "pictures" / f"{name}.svg").exists(), name


def test_pictures_are_those_of_the_pages():
    ours = [page.read_text() for page in PAGES if not of_the_course(page)]
    shown = {found for text in ours for found in re.findall(r"pictures/([\w.-]+\.svg)", text)}
    assert shown == {path.name for path in (DOCS / "pictures").glob("*.svg")}


def test_links_to_keys_and_tables_lead_somewhere():
    """Links to keys and tables on the page that is made."""
    made = reference.pages.configuration()
    for page in SITE:
        for link in links(page):
            target, _, anchor = link.partition("#")
            if target.endswith("configuration.md") and anchor:
                assert f"({anchor})=" in made or f"## {anchor}\n" in made, link


def test_messages_of_the_page_of_troubleshooting_are_in_the_source():
    """Of each heading some words in a row: what a run fills in stands between them."""
    source = "\n".join(
        path.read_text()
        for folder in ("mpitrain", "comm", "schedules")
        for path in (ROOT / folder).rglob("*.py")
    )
    joined = re.sub(r'"\s*\n\s*f?r?"', "", source)
    of_others = "The PMIx server"
    text = (DOCS / "guides" / "troubleshooting.md").read_text()
    for heading in re.findall(r"^### (.+)$", text, re.M):
        if heading.startswith(of_others):
            continue
        words = re.sub(r"^(\w+Error|mpitrain): ", "", heading).replace("...", " ").split()
        runs = (" ".join(words[a:b]) for a in range(len(words)) for b in range(a + 1, len(words) + 1))
        found = max((run for run in runs if run in joined), key=len, default="")
        assert not words or len(found) >= LEAST_OF_A_MESSAGE, (
            f"{heading}: no more than {found!r} is in the source"
        )


def test_pages_are_made_from_this_tree(tmp_path):
    pytest.importorskip("sphinx")  # of the extra `docs`
    (tmp_path / "mpitrain").mkdir()
    (tmp_path / "mpitrain" / "__init__.py").write_text('__version__ = "of another tree"\n')
    code = f"import runpy; print(runpy.run_path({str(DOCS / 'conf.py')!r})['reference'].pages.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()).is_relative_to(DOCS.parent)

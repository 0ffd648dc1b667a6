"""Commands of the documents that start ranks, and the site itself, with MPITRAIN_DOCS=1."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import search_queries
from launch import HERE, environment
from pages import DOCS, ROOT, SWITCH, blocks, commands, run

SLOW = [block for block in blocks() if block.is_slow]
SLOWLY = pytest.mark.skipif(SWITCH not in os.environ, reason=f"{SWITCH}=1 runs it")
SMALL = f"""data.source = "text"
data.path = "{ROOT / "README.md"}"
data.sequence = 16
model = {{ layers = 4, width = 16, heads = 2, kv_heads = 1, ffn = 32 }}
"""


@SLOWLY
@pytest.mark.parametrize("block", SLOW, ids=lambda block: f"{block.page}-{block.number}")
def test_commands_of_a_page_run(block, tmp_path):
    run(block, tmp_path)


@pytest.mark.parametrize("small", [SMALL, pytest.param("", marks=SLOWLY)], ids=["small", "as they stand"])
def test_the_ten_commands_of_the_readme_run_in_an_empty_folder(tmp_path, small):
    """In the order in which they stand there, with nothing that a first run may have left.

    small: further keys of my.toml.
    """
    text = (ROOT / "README.md").read_text().partition("## Ten commands")[2]
    first, *ten = re.search(r"```sh\n(.*?)```", text, re.S)[1].splitlines()
    assert len(ten) == 10 and "> my.toml" in first
    first = first.replace("60", "2") if small else first
    typed = [first, f"cat >> my.toml <<'END'\n{small}END", *ten]
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(typed)],
        cwd=tmp_path,
        env=environment(PATH=os.pathsep.join([commands(), str(HERE), os.environ["PATH"]])),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert len(re.findall("^done: 2 steps" if small else "^done: 60 steps", done.stdout, re.M)) == 2
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"my", "pp4"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; skipped where Sphinx isn't installed."""
    if SWITCH not in os.environ:
        pytest.skip(f"{SWITCH}=1 builds it")
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", str(DOCS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yield folder
    shutil.rmtree(folder)


def test_the_site_builds_without_a_warning_and_its_links_lead_somewhere(site):
    ids = {path: set(re.findall(r'\bid="([^"]+)"', path.read_text())) for path in site.rglob("*.html")}
    for path in ids:
        for link in re.findall(r'href="([^"]+)"', path.read_text()):
            if re.match(r"[a-z]+:", link) or not link:
                continue
            target, _, anchor = link.partition("#")
            there = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert there.exists(), f"{path.name}: {link}"
            assert not anchor or there.suffix != ".html" or anchor in ids[there], f"{path.name}: {link}"


def test_the_site_loads_nothing_from_elsewhere(site):
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link)[^>]+(?:src|href)="(https?:[^"]+)"', path.read_text())
        assert not [each for each in loaded if "canonical" not in each], (path, loaded)


def test_the_search_finds_the_page_that_is_about_a_word_among_the_first_three(site):
    """By the site's own scripts: the words of users of other trainers, and their pages."""
    node = shutil.which("node") or pytest.skip("needs node")
    wanted = {word: page for page, words in search_queries.PAGES.items() for word in words}
    command = [node, ROOT / "tests" / "support" / "site_search.js", site]
    done = subprocess.run(command, input=json.dumps([*wanted]), capture_output=True, text=True, check=True)
    pages = [[link.partition("#")[0] for link in links] for links in json.loads(done.stdout)]
    first = {word: list(dict.fromkeys(names))[:3] for word, names in zip(wanted, pages, strict=True)}
    assert not {word: names for word, names in first.items() if wanted[word] not in names}

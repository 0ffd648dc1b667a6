"""Files, keys, commands and options that a page names are there, and terms have their numbers.

Paths are written from the top of the tree. What isn't ours, or is made up, is listed here.
"""

import re
import sys

import pytest
from pages import CODE, DOCS, ROOT

sys.path.append(str(DOCS))
import build

from mpitrain.cli import cli
from mpitrain.commands.reference.keys import every_key, tables

TREE = "mpitrain", "comm", "schedules", "docs", "tests", "jobs", "examples", "benchmarks"
NAMED = re.compile(r"`([^`\n]+)`")
PATH = re.compile(rf"(?:(?:{'|'.join(TREE)})/[\w./-]*|[\w-]+\.(?:py|sh|cff|cfg|csv))(?:::(?P<name>\w+))?")
KEY = re.compile(r"(?<![\w./-])([a-z]+\.[a-z_0-9]+)(?![\w./(])")
OPTION = re.compile(r"(?<!\S)(--?[a-z][\w-]*)")
OF_USERS = {"json.py", "torch.py", "mpitrain.py"}  # in a folder that isn't the tree
OF_OTHERS = {
    "--nv",
    "--shm-size",
    "--rocm",
    "--with-cuda",
    "--with-ft",
    "--model_args",
    "--bind-to",
    "--distribution",
    "--map-by",
    "--no-binary",
}
NO_KEYS = {"run.lock", "run.svg", "model.generate"}  # files, and a method of transformers
PLACEHOLDERS = {"COMMAND", "NAME"}
PAPER = re.compile(r"\[(\d{4}\.\d{4,5})\]\(https://arxiv\.org/abs/(\S+?)(?:v\d)?\)")
TERMS = {
    r"\b\dF\dB\b": {"1F1B"},
    r"\bZeRO-(\d)\b": {"0", "1", "2", "3"},
    r"\bFSDP(\d)\b": {"1", "2"},
    r"\bfp(\d+)\b": {"8", "16", "32", "64"},
    r"\bbf(\d+)\b": {"16"},
    r"\b[Ee]xit code (\d+)\b": {"0", "1", "2", "3", "75"},
    r"\btorch==([\d.]+)": {"2.11.0", "2.13.0"},  # on GPUs, and what setup.cfg allows
}


def name_of(page):
    return str(page.relative_to(ROOT))


def named(page):
    """Return what stands between backticks, outside blocks and comments."""
    text = re.sub(r"<!--.*?-->", "", CODE.sub("", page.read_text()), flags=re.S)
    return NAMED.findall(text)


def options_of(command):
    """Return the options of a command and of those below it."""
    found = {word for each in command.params for word in (*each.opts, *each.secondary_opts)}
    return found.union({"--help", "-h"}, *map(options_of, getattr(command, "commands", {}).values()))


def command_of(words):
    """Return the command that words name, as far as they do."""
    command = cli
    for word in words:
        if word in getattr(command, "commands", {}):
            command = command.commands[word]
        else:
            break
    return command, word


@pytest.mark.parametrize("page", build.pages(), ids=name_of)
def test_paths_lead_from_the_top_of_the_tree_to_what_they_name(page):
    for text in named(page):
        found = PATH.fullmatch(text)
        if found is None or text in OF_USERS:
            continue
        path = ROOT / text.partition("::")[0]
        assert path.exists(), f"{text}: needed a path from the top of the tree"
        if found["name"]:
            assert re.search(rf"\b{found['name']}\b", path.read_text()), text


@pytest.mark.parametrize("page", build.pages(), ids=name_of)
def test_keys_commands_and_options_are_there(page):
    for text in named(page):
        keys = {key for key in KEY.findall(text) if key.partition(".")[0] in tables()} - NO_KEYS
        assert keys <= set(every_key()), f"{text}: {keys - set(every_key())}"
        options = set(OPTION.findall(text)) - OF_OTHERS
        if text.startswith("mpitrain "):
            supervised = text[text.rindex("mpitrain ") :]
            options = set(OPTION.findall(supervised)) - OF_OTHERS
            command, last = command_of(supervised.split()[1:])
            has_more = hasattr(command, "commands") and not last.startswith("-")
            assert not has_more or last in {*PLACEHOLDERS, *command.commands, command.name}, text
            assert options <= options_of(command), text
        elif text.startswith("--"):
            others = re.split("[ =]", text)[0] in OF_OTHERS or "benchmarks/" in page.read_text()
            assert others or OPTION.match(text)[1] in options_of(cli), text


@pytest.mark.parametrize("page", build.pages(), ids=name_of)
def test_numbers_of_papers_are_those_of_their_links_and_terms_have_theirs(page):
    text = page.read_text()
    for label, target in PAPER.findall(text):
        assert label == target
    for pattern, values in TERMS.items():
        assert set(re.findall(pattern, text)) <= values, f"{name_of(page)}: {pattern}"

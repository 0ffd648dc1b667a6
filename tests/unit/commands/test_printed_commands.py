"""Every command that a message or an output gives the reader is one that the command line takes."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import mpitrain
from mpitrain.cli import cli

ROOT = Path(mpitrain.__file__).parent
ROOMS = (ROOT, ROOT.parent / "comm", ROOT.parent / "schedules")
GIVEN = re.compile(r"\bmpitrain (?P<words>[a-z][a-z-]*\b[^`;,()\n]*)")
# what follows the program's name where a text speaks of the program, and gives no command
PROSE = {"again", "checkpoint", "reads", "recording", "that", "writes", "wrote"}
OPTION = re.compile(r"(?<!\S)--[a-z][a-z-]*")
LEFT_OUT = "PLACEHOLDER"  # where a message has a value
CONFIG = (
    "run = {dir = 'runs/a', steps = 1}\n"
    "model = {layers = 2, width = 32, heads = 2, kv_heads = 1, ffn = 64}\n"
    "data = {sequence = 32}\n"
)


def texts_of(source: str) -> Iterator[str]:
    """Yield the texts of a file that aren't docstrings, with a word where they have a value."""
    tree = ast.parse(source)
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else LEFT_OUT for part in node.values)
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner | prose:
            yield node.value


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that some words name, and what follows. Raises KeyError for none."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words and (LEFT_OUT not in words[0] or command is cli):
        if words[0].startswith("-") or words[0] == "--help":
            break
        command, words = command.commands[words[0].rstrip(".:")], words[1:]
    return command, words


def wrong_in(text: str) -> list[str]:
    """Return what is wrong with the commands of a text: names and options that there aren't."""
    wrong = []
    for found in GIVEN.finditer(text):
        words = found["words"].split()
        if words[0] in PROSE:
            continue
        try:
            command, _ = command_of(words)
        except KeyError as error:
            wrong.append(f"no command {error}: mpitrain {found['words']}")
            continue
        there = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        wrong += [
            f"no option {option}: mpitrain {found['words']}"
            for option in OPTION.findall(found["words"])
            if option not in there | {"--help"}
        ]
    return wrong


def test_commands_in_messages_exist_with_their_options():
    files = [file for room in ROOMS for file in sorted(room.rglob("*.py"))]
    texts = [(file, text) for file in files for text in texts_of(file.read_text())]
    assert sum(bool(GIVEN.search(text)) for _, text in texts) > 30
    assert {f"{file.name}: {fault}" for file, text in texts for fault in wrong_in(text)} == set()


@pytest.mark.parametrize("text", ["type mpitrain ckpt mend x", "mpitrain trian", "mpitrain run --resume"])
def test_a_command_that_there_is_not_is_seen(text):
    assert len(wrong_in(text)) == 1


OUTPUTS = {
    "plan": ("plan", "c.toml", "--ranks", "8", "--machine", "h100-80gb", "--out", "planned file.toml"),
    "plan-small": ("plan", "c.toml", "--ranks", "2"),
    "memory": ("memory", "c.toml", "--ranks", "2"),
    "memory-refused": ("memory", "c.toml", "--ranks", "2", "--set", "memory.limit_gb=0.01"),
    "check": ("check", "c.toml", "--ranks", "4", "--set", "parallel.pp=2"),
    "check-refused": ("check", "c.toml", "--ranks", "3", "--set", "parallel.tp=2"),
    "schedule": ("schedule", "1f1b", "--stages", "2", "--microbatches", "4"),
    "no-run": ("generate", "runs/none", "--prompt", "a"),
    "no-folder": ("import", "none", "--to", "b"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_commands_that_an_output_gives_are_taken(name, tmp_path, monkeypatch):
    """Parsed as a shell gives them, files and keys included."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CONFIG)
    output = CliRunner().invoke(cli, OUTPUTS[name]).output
    assert wrong_in(output) == []
    for line in re.findall(r"mpirun -n \S+ mpitrain .*|^\s*mpitrain [a-z].*", output, re.MULTILINE):
        words = shlex.split(line[line.index("mpitrain ") :])[1:]
        command, arguments = command_of(words)
        context = command.make_context(command.name, arguments)
        if config := context.params.get("config"):
            assert (tmp_path / config).exists(), line
    if name == "plan":
        assert "mpitrain run 'planned file.toml'" in output

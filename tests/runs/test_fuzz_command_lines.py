"""Random command lines: an answer and 0, or one message and 2.

MPITRAIN_EFFORT=500 tries as many, MPITRAIN_EFFORT=all 500.

Most run in this process; of real processes a part.
"""

import os
import random

import click
import pytest
from click.testing import CliRunner
from effort import cases
from launch import MPITRAIN, environment, finished

from mpitrain.cli import cli
from mpitrain.errors import BAD_INPUT, InputError
from mpitrain.schedules import catalog

COUNT = cases(60, 500)
REAL = max(1, COUNT // 12)

NUMBERS = [
    "1",
    "2",
    "3",
    "4",
    "8",
    "0",
    "-1",
    "1000000000",
    "1" + "0" * 30,
    "9" * 5000,
    "²",
    "٣",
    "",
    "nan",
    "1e3",
    "0x4",
    "\x1b",
    "x" * 3000,
]
NAMES = [
    *catalog.NAMES,
    "compare",
    "",
    "1f1",
    "x" * 3000,
    ".",
    "/dev/zero",
    "/dev/null",
    "fifo",
    "deep.json",
    "odd.csv",
    "caf\udce9",
    "\x1b[31m",
    "loop",
]
SETS = [
    "a",
    "=",
    "",
    "run.steps=",
    "run.steps=1\nrun.seed=2",
    "run.dir=\udcff",
    "parallel.pp=2",
    "run.x=1",
    "x" * 5000,
    "run.steps=" + "9" * 5000,
]
SETS += [
    "model.layers=" + "[" * 3000,
    "pipeline.schedule=fifo",
    "data.tokenizer=fifo",
    "data.tokenizer=/dev/zero",
    "pipeline.schedule=odd.csv",
]
OPTIONS = {
    "schedule": {
        **{
            f"--{name}": NUMBERS
            for name in (
                "stages",
                "microbatches",
                "chunks",
                "group",
                "segments",
                "memory-limit",
                "weight-memory",
            )
        },
        "--times": [
            "1,1,1,0",
            "1,2,3",
            "nan,1,1,1",
            "1e308,1,1,1",
            "²,1,1,1",
            "",
            ",,,",
            "9" * 5000 + ",1,1,1",
        ],
        "--out": ["out.txt", "out", ".", "absent/x.svg", "fifo", "/dev/full", "x" * 300 + ".txt", ""],
        "--trace": ["deep.json", "odd.csv", "fifo", "/dev/zero", "", "absent", "."],
    },
    **{name: {"--ranks": NUMBERS, "--set": SETS} for name in ("check", "memory")},
    "program": {"--ranks": NUMBERS, "--rank": NUMBERS, "--set": SETS},
    "verify": {
        "--layout": [
            "tp=²",
            "tp=2,tp=3",
            ",",
            "",
            "tp=-1",
            "tp=" + "9" * 5000,
            "xp=2",
            "tp=1000000,pp=1000000",
            "\x1b",
        ]
    },
    "nonsense": {"--nonsense": NUMBERS},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "deep.json").write_text('{"traceEvents": ' + "[" * 100_000)
    (tmp_path / "odd.csv").write_text("0F0,0B0," + "x" * 200_000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command_line(dice: random.Random) -> list[str]:
    command = dice.choice([*OPTIONS, "schedule", "schedule"])
    words = [command]
    if command == "schedule":
        words += [dice.choice(NAMES), "--stages", dice.choice("234"), "--microbatches", dice.choice("48")]
    elif dice.random() < 0.5:
        words.append(
            dice.choice(
                [
                    "",
                    "absent.toml",
                    "fifo",
                    "deep.json",
                    "odd.csv",
                    "/dev/zero",
                    "loop",
                    ".",
                    "x" * 300,
                    "caf\udce9",
                ]
            )
        )
    for _ in range(dice.randrange(4) if command != "verify" else 1):
        option = dice.choice([*OPTIONS[command]])
        words += [option, dice.choice(OPTIONS[command][option])] if dice.random() < 0.95 else [option]
    if dice.random() < 0.05:
        words.append(dice.choice(["--help", "--json", "-", "--", "--\x1b", "x"]))
    return words


def tree(folder) -> list:
    return sorted((path, sorted(set(files) - {"out.txt"})) for path, _, files in os.walk(folder))


@pytest.mark.parametrize("number", range(COUNT))
def test_an_answer_or_one_message(folder, number):
    words = command_line(random.Random(number))
    before = tree(folder)
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    error = done.exception
    if error is not None:
        assert isinstance(error, (InputError, click.ClickException)) and error.exit_code == BAD_INPUT, (
            words,
            error,
            done.exc_info,
        )
        assert done.stdout == "" and not (folder / "out.txt").exists(), words
    assert tree(folder) == before, words


@pytest.mark.parametrize("number", range(REAL))
def test_real_processes(folder, number):
    words = [os.fsencode(word) for word in command_line(random.Random(-1 - number))]
    before = tree(folder)
    done = finished([MPITRAIN, *words], capture_output=True, timeout=60, env=environment())
    text = done.stderr.decode()
    assert done.returncode in (0, BAD_INPUT) and "Traceback" not in text, (words, text)
    if done.returncode == BAD_INPUT:
        assert done.stdout == b"" and len(text) < 3000 and "\x1b" not in text, text
        assert sum("Error: " in line[:20] for line in text.splitlines()) == 1, text
    else:
        assert text == ""
    assert tree(folder) == before

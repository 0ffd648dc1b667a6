"""Random configurations: each is accepted, or refused with one message.

MPITRAIN_EFFORT=20000 tries as many, MPITRAIN_EFFORT=all 20,000.
"""

import os
import random
import string
import time

import pytest
from effort import cases

from mpitrain import config as settings
from mpitrain.errors import BAD_INPUT, InputError
from mpitrain.plan.settings.resolve import resolve

COUNT = cases(400, 20_000)
PIECES = 20  # tests, so that one that takes long is seen

KEYS = list(settings.flatten(settings.Config()))
ODD_KEYS = [
    "",
    "run",
    "run.",
    ".x",
    "x.y.z",
    "run.dir.x",
    "\0",
    "\udcff.x",
    "r\nun.dir",
    "base",
    '"run".dir',
    "run.stepz",
    "a" * 5000,
]
ODD = [
    *(
        "",
        " ",
        "0",
        "1",
        "-1",
        "2",
        "3",
        "4",
        "7",
        "12",
        "64",
        "1e3",
        "0.5",
        "1e308",
        "1e-320",
        "nan",
        "inf",
        "-inf",
        "true",
        "false",
    ),
    *(
        "9" * 30,
        "9" * 5000,
        "0x" + "f" * 5000,
        str(2**31),
        str(2**63),
        str(2**64),
        "²",
        "٣",
        "1_000",
        "+1",
        "--1",
        "0o7",
        "1e999999",
    ),
    *(
        "[" * 3000 + "]" * 3000,
        "[" * 3000,
        "{a=" * 3000 + "1" + "}" * 3000,
        "[]",
        "[1]",
        "[1, 'x']",
        "[1, [2]]",
        "[0.9, 0.95]",
        "{}",
        "{a=1}",
    ),
    *(
        "1979-05-27",
        "1979-05-27T07:32:00Z",
        "07:32:00",
        "2023-02-30",
        "1\nrun.seed=2",
        "1\n[run]\nseed=2",
        '"""',
        "'''x'''",
        "# x",
        "1 # x",
    ),
    *(
        "\0",
        "a\0b",
        "\udcff",
        "\ud83d",
        "🚀",
        "模型",
        "\x1b[31m",
        "../..",
        "/dev/null",
        "x" * 5000,
        "a" + ".a" * 3000,
        '"\\u0000"',
        '"\\ud800"',
    ),
    *(
        "interleaved",
        "zb-auto",
        "seq1f1b",
        "dualpipe",
        "cuda",
        "bytes",
        "text",
        "ulysses",
        "ring",
        "every-k",
        "full",
        "fp8",
        "sgd",
        "muon",
    ),
]
LIVELY = [
    *(
        "pipeline.schedule=seq1f1b",
        "pipeline.schedule=zbv",
        "pipeline.schedule=interleaved",
        "parallel.zero=3",
        "parallel.zero=2",
    ),
    *(
        "parallel.reduce=microbatch",
        "parallel.tp=2",
        "parallel.pp=2",
        "parallel.cp=2",
        "model.layers=8",
        "batch.global=1000000",
    ),
]


def value(dice: random.Random) -> str:
    match dice.randrange(4):
        case 0 | 1:
            return dice.choice(ODD)
        case 2:
            return str(dice.choice((1, -1)) * dice.randrange(10 ** dice.randrange(1, 25)))
        case _:
            return "".join(dice.choice(string.printable) for _ in range(dice.randrange(12)))


def overrides(dice: random.Random) -> list[str]:
    found = dice.sample(LIVELY, dice.randrange(3))
    for _ in range(dice.randrange(1, 4)):
        key = dice.choice(ODD_KEYS) if dice.random() < 0.1 else dice.choice(KEYS)
        found.append(f"{key}={value(dice)}" if dice.random() < 0.97 else value(dice))
    return found


def toml(dice: random.Random) -> str:
    """Return a file of the same odd values, sometimes torn."""
    lines = [f"{key} = {value(dice)}" for key in dice.sample(KEYS, dice.randrange(1, 4))]
    text = "\n".join(lines)
    return text[: dice.randrange(len(text) + 1)] if dice.random() < 0.3 else text


def refusal(error: InputError) -> None:
    text = str(error)
    assert error.exit_code == BAD_INPUT and len(text) < 2500 and text.isprintable(), text
    text.encode()


@pytest.mark.parametrize("piece", range(PIECES))
def test_each_is_accepted_or_refused_with_one_message(tmp_path, piece):
    dice = random.Random(piece)
    accepted = 0
    for _ in range(-(-COUNT // PIECES)):
        path = None
        asked = overrides(dice)
        if dice.random() < 0.3:
            path = tmp_path / "fuzz.toml"
            asked = asked[: dice.randrange(2)]
            path.write_text(toml(dice), encoding="utf-8", errors="surrogatepass")
        ranks = dice.choice((1, 2, 4, 6, 64, 1_000_000))
        begin = time.process_time()
        try:
            config = resolve(settings.load(path, asked), ranks, 256)
            accepted += 1
            (tmp_path / "config.toml").write_text(settings.to_toml(config), encoding="utf-8")
            assert settings.load(tmp_path / "config.toml") == config
        except InputError as error:
            refusal(error)
        assert time.process_time() - begin < 10, asked
    assert os.listdir(tmp_path) in (
        [],
        ["fuzz.toml"],
        ["config.toml"],
        ["config.toml", "fuzz.toml"],
        ["fuzz.toml", "config.toml"],
    )
    assert accepted or COUNT < 4_000


def test_a_long_text_makes_no_long_message():
    for family in ("llama", "mixtral", "deepseek-v3"):
        for key in KEYS:
            try:
                resolve(settings.load(None, [f"model.family={family}", f"{key}={'a' + '.a' * 3000}"]), 1, 256)
            except InputError as error:
                refusal(error)

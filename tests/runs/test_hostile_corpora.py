"""Damaged and hostile corpora of all formats: one message that names the place, exit code 2, nothing written.

MPITRAIN_EFFORT=500 tries as many, 12 are tried by default. Commands run one after the other in one rank: then
it is known how much memory they and their children took at most.
"""

import json
from pathlib import Path

import hostile_corpora
import pytest
from effort import numbers
from launch import options, run_commands, tail

NUMBERS = numbers(range(12), 500)
AT_ONCE = 25
MOST_RESIDENT = 2 << 30  # of a process: the interpreter with its libraries takes 0.3 GB of it


def command(number, case, folder):
    settings = {"data.source": case.source, "data.path": case.path, "run.dir": folder / "run"}
    if number % 3 == 2:
        return ("data", "prepare", *options(settings | {"data.tokens": folder / "store"}))
    return ("data", "prepare", *options(settings))


def left(folder):
    """Return the files that a refused command has left, but for a lock."""
    return [path.name for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("first", range(NUMBERS.start, NUMBERS.stop, AT_ONCE))
def test_a_hostile_corpus_is_named_and_refused(tmp_path, first):
    cases = {}
    for number in range(first, min(first + AT_ONCE, NUMBERS.stop)):
        folder = tmp_path / str(number)
        (folder / "corpus").mkdir(parents=True)
        cases[number] = hostile_corpora.corpus(folder / "corpus", number)
    commands = [command(number, case, tmp_path / f"out-{number}") for number, case in cases.items()]
    usage = tmp_path / "usage.json"
    program = Path(__file__).parents[1] / "support" / "metered.py"
    ended = run_commands(1, *commands, program=program, env={"USAGE": str(usage)}, timeout=600)
    faults = {}
    for (number, case), done in zip(cases.items(), ended, strict=True):
        said = [line for line in done.output.splitlines() if not line.startswith("tokenizing: ")]
        fine = done.returncode == 2 and len(said) == 1 and case.names in done.output
        fine = fine and len(done.output) < 2_500 and "Traceback" not in done.output
        fine = fine and not left(tmp_path / f"out-{number}")
        read = done.returncode == 0 and not case.refused
        if not (fine or read):
            faults[number] = (
                case,
                done.returncode,
                tail(done.output[-1_000:]),
                left(tmp_path / f"out-{number}"),
            )
    assert not faults, "\n".join(f"{number}: {fault}" for number, fault in faults.items())
    resident = json.loads(usage.read_text())
    assert max(resident) < MOST_RESIDENT, resident

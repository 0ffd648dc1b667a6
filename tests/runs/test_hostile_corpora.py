"""Damaged and hostile corpora of all formats: one message that names the place, exit code 2, nothing written.

MPITRAIN_EFFORT=500 tries as many, and trains on 24 of them; by default 12 and 4. Commands run one after the
other in one rank: then it is known how much memory they and their children took at most.
"""

import json
from pathlib import Path

import hostile_corpora
import pytest
from effort import cases, numbers
from launch import TINY, options, run_commands, tail

NUMBERS = numbers(range(12), 500)
RUNS = range(cases(4, 24))
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


def fault(case, done, folder):
    """Return what a command did wrong with a corpus; None: it named and refused it, or read it."""
    said = [line for line in done.output.splitlines() if not line.startswith("tokenizing: ")]
    fine = done.returncode == 2 and len(said) == 1 and case.names in done.output
    fine = fine and len(done.output) < 2_500 and "Traceback" not in done.output and not left(folder)
    if fine or (done.returncode == 0 and not case.refused):
        return None
    return case, done.returncode, tail(done.output[-1_000:]), left(folder)


def written(folder, chosen):
    """Return the corpora of some numbers, each in a folder of its own."""
    corpora = {}
    for number in chosen:
        (folder / str(number) / "corpus").mkdir(parents=True)
        corpora[number] = hostile_corpora.corpus(folder / str(number) / "corpus", number)
    return corpora


def require_none(faults):
    faults = {number: found for number, found in faults.items() if found}
    assert not faults, "\n".join(f"{number}: {found}" for number, found in faults.items())


@pytest.mark.parametrize("first", range(NUMBERS.start, NUMBERS.stop, AT_ONCE))
def test_a_hostile_corpus_is_named_and_refused(tmp_path, first):
    corpora = written(tmp_path, range(first, min(first + AT_ONCE, NUMBERS.stop)))
    commands = [command(number, case, tmp_path / f"out-{number}") for number, case in corpora.items()]
    usage = tmp_path / "usage.json"
    program = Path(__file__).parents[1] / "support" / "metered.py"
    ended = run_commands(1, *commands, program=program, env={"USAGE": str(usage)}, timeout=600)
    done = dict(zip(corpora, ended, strict=True))
    outs = {number: tmp_path / f"out-{number}" for number in corpora}
    require_none({number: fault(case, done[number], outs[number]) for number, case in corpora.items()})
    resident = json.loads(usage.read_text())
    assert max(resident) < MOST_RESIDENT, resident


def test_a_run_refuses_it_too_and_check_reads_no_text(tmp_path):
    corpora = written(tmp_path, RUNS)
    ways = {}
    for number, case in corpora.items():
        settings = {**TINY, "data.source": case.source, "data.path": case.path, "run.steps": 1}
        ways[number] = options(settings | {"run.dir": tmp_path / f"out-{number}" / "run"})
    runs = run_commands(1, *[("run", *words) for words in ways.values()], timeout=300)
    done = dict(zip(corpora, runs, strict=True))
    refused = {number: case for number, case in corpora.items() if case.refused}
    outs = {number: tmp_path / f"out-{number}" for number in refused}
    require_none({number: fault(case, done[number], outs[number]) for number, case in refused.items()})
    assert all(one.returncode in (0, 2) and "Traceback" not in one.output for one in runs)
    checks = run_commands(1, *[("check", *ways[number]) for number in refused], timeout=300)
    assert all(one.returncode == 0 for one in checks), tail(checks[0].output)
    assert not [number for number, out in outs.items() if left(out)]

"""`mpitrain data show`: the tokens that a step has read are those of the run's own batches.

MPITRAIN_EFFORT=50 looks at 50 random steps of packed rows on each of four layouts, at three by default.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import recorded_batches
from effort import numbers
from launch import MPITRAIN, mpirun, run_commands, tail
from test_run_mixture import DOCUMENTS, run, run_words, written

from mpitrain.data.tokens import open_ends, open_tokens

LAYOUTS = {  # settings, the rank that is recorded, and steps of an earlier start
    "dp": ({"parallel_dp": 2}, 1, 0),
    "cp": ({"parallel_cp": 2}, 1, 0),
    "pp": ({"parallel_pp": 2, "data_documents": "separate"}, 0, 0),
    "resumed": ({"parallel_dp": 2, "data_order": "sorted"}, 1, 2),
}
STEP = 4
STEPS = numbers(range(3), 50)  # of which documents are shown
PACKED = dict(data_documents="packed", data_sequence=64, batch_growth="[[4,16]]", run_eval_every=0)


def shown(run_dir, *words):
    done = mpirun(1, MPITRAIN, "data", "show", str(run_dir), *words)
    assert done.returncode == 0, tail(done.output)
    return done.output


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_documents_of_a_step_are_those_of_its_batch(tmp_path, layout):
    settings, rank, before = LAYOUTS[layout]
    config = written(tmp_path)
    run_dir = tmp_path / "run"
    if before:
        run(2, config, run_dir, run_steps=before, **settings)
    done = run(2, config, run_dir, "--record", f"{rank}:{STEP}", run_steps=STEP, **settings)
    assert done.returncode == 0, tail(done.output)
    found = json.loads(shown(run_dir, "--step", str(STEP), "--rank", str(rank), "--json"))
    parts = [part for sequence in found["sequences"] for part in sequence["parts"]]
    read = np.load(run_dir / f"record-{rank}-{STEP}.npz")["tokens"].reshape(-1)
    assert [token for part in parts for token in part["tokens"]] == read.tolist()
    assert "".join(part["text"] for part in parts) == bytes(read.tolist()).decode()
    tokens, ends = open_tokens(run_dir / "data"), open_ends(run_dir / "data")
    sources = [str(tmp_path / name) for name in ("megatron", "jsonl", "datatrove")]
    for part in parts:
        number = part["document"] + 30 * sources.index(part["source"])
        begin = (int(ends[number - 1]) if number else 0) + part["offset"]
        assert tokens[begin : begin + len(part["tokens"])].tolist() == part["tokens"]
        assert begin + len(part["tokens"]) <= ends[number]
    assert all((one["positions"] is None) == (layout != "cp") for one in found["sequences"])


def test_lines_name_the_place_and_refuse_steps_that_are_not_done(tmp_path):
    done = run(1, written(tmp_path), tmp_path / "run", run_steps=1)
    assert done.returncode == 0, tail(done.output)
    text = shown(tmp_path / "run", "--step", "1")
    assert text.splitlines()[-1] == "read from tokens.bin: 136 bytes in 8 pieces"
    assert "sequences 0 to " in text and "megatron, document " in text and "says" in text
    for words, message in (
        (("--step", "2"), "--step 2: "),
        (("--step", "1", "--rank", "1"), "--rank 1: "),
        (("--step", "5"), "by step 5 -7 tokens were read: it is damaged"),
        (("--step", "6"), "tokens were read: it is damaged"),
    ):
        if words[1] == "5":
            lines = f'{{"step": 5, "read": -7}}\n{{"step": 6, "read": {10**30}}}\n'
            (tmp_path / "run" / "metrics.jsonl").write_text(lines)
        done = mpirun(1, MPITRAIN, "data", "show", str(tmp_path / "run"), *words)
        assert done.returncode == 2 and message in done.output, tail(done.output)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("axis", ["dp", "cp", "pp", "tp"])
def test_packed_documents_that_are_shown_are_those_of_the_batches(tmp_path, axis):
    """Inputs and targets of every microbatch follow from the parts that are shown, and from nothing else."""
    run_dir, batches = tmp_path / "run", tmp_path / "batches"
    batches.mkdir()
    settings = {**PACKED, f"parallel_{axis}": 2, "run_steps": len(STEPS) + 5, "run_eval_batches": 1}
    words = ("run", *run_words(written(tmp_path), run_dir, **settings))
    program, env = Path(recorded_batches.__file__), {"BATCHES": str(batches)}
    (done,) = run_commands(2, words, program=program, env=env)
    assert done.returncode == 0, tail(done.output)
    dice = random.Random(axis)
    steps = sorted(dice.sample(range(1, len(STEPS) + 6), len(STEPS)))
    chosen = [(step, dice.randrange(2)) for step in steps]
    commands = [
        ("data", "show", str(run_dir), "--step", str(step), "--rank", str(rank), "--json")
        for step, rank in chosen
    ]
    found = run_commands(1, *commands, program=program, env={"BATCHES": str(tmp_path)}, timeout=300)
    for (step, rank), done in zip(chosen, found, strict=True):
        assert done.returncode == 0, tail(done.output)
        found = json.loads(done.output)
        batch = np.load(batches / f"{step}-{rank}.npz")
        inputs, targets = rows_of(found)
        assert {*batch} >= {"documents"} and {*batch} & {"tokens", "targets"}
        assert "tokens" not in batch or batch["tokens"].tolist() == inputs
        assert "targets" not in batch or batch["targets"].tolist() == targets
        assert batch["opens"] == np.load(batches / f"1-{rank}.npz")["opens"] > 0  # none in a step
        assert found["bytes"] == sum(len(part["tokens"]) for part in parts_of(found))
        for part in parts_of(found):
            assert part["text"] == text_of(tmp_path, part)


def parts_of(found):
    return [part for sequence in found["sequences"] for part in sequence["parts"]]


def rows_of(found):
    """Return the inputs and the targets of the rows that are shown, at the positions of the rank."""
    inputs, targets = [], []
    for sequence in found["sequences"]:
        row = [token for part in sequence["parts"] for token in part["tokens"]]
        nexts = [next for part in sequence["parts"] for next in (*part["tokens"][1:], -1)]
        length = PACKED["data_sequence"]
        row += [0] * (length - len(row))
        nexts += [-1] * (length - len(nexts))
        positions = range(length) if sequence["positions"] is None else sequence["positions"]
        inputs.append([row[position] for position in positions])
        targets.append([nexts[position] for position in positions])
    return inputs, targets


def text_of(folder, part):
    """Return the text of a part, from the documents that were written; an end of text is NUL."""
    names = [str(folder / name) for name in ("megatron", "jsonl", "datatrove")]
    document = DOCUMENTS[names.index(part["source"]) + 3 * part["document"]]
    return (bytes(document) + b"\0")[part["offset"] :][: len(part["tokens"])].decode()

"""`mpitrain data show`: the tokens that a step has read are those of the run's own batches."""

import json

import numpy as np
import pytest
from launch import MPITRAIN, mpirun, tail
from test_run_mixture import run, written

from mpitrain.data.tokens import open_ends, open_tokens

LAYOUTS = {  # settings, the rank that is recorded, and steps of an earlier start
    "dp": ({"parallel_dp": 2}, 1, 0),
    "cp": ({"parallel_cp": 2}, 1, 0),
    "pp": ({"parallel_pp": 2, "data_documents": "separate"}, 0, 0),
    "resumed": ({"parallel_dp": 2, "data_order": "sorted"}, 1, 2),
}
STEP = 4


def shown(run_dir, *words):
    done = mpirun(1, MPITRAIN, "data", "show", str(run_dir), *words)
    assert done.returncode == 0, tail(done.output)
    return done.output


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
    assert (found["positions"] is None) == (layout != "cp")


def test_lines_name_the_place_and_refuse_steps_that_are_not_done(tmp_path):
    done = run(1, written(tmp_path), tmp_path / "run", run_steps=1)
    assert done.returncode == 0, tail(done.output)
    text = shown(tmp_path / "run", "--step", "1")
    assert "sequences 0 to " in text and "megatron, document " in text and "says" in text
    for words, message in (
        (("--step", "2"), "--step 2: "),
        (("--step", "1", "--rank", "1"), "--rank 1: "),
    ):
        done = mpirun(1, MPITRAIN, "data", "show", str(tmp_path / "run"), *words)
        assert done.returncode == 2 and message in done.output, tail(done.output)

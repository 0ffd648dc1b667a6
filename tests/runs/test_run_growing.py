"""A batch that grows, weights that change, a source that ends, an epoch's end: restarts change no bit.

MPITRAIN_EFFORT=10 restarts ten times in a row; by default twice.
"""

import json
import random
from itertools import accumulate

from effort import numbers
from launch import MPITRAIN, mpirun, tail
from test_run_mixture import DOCUMENTS, losses, run, written

RESTARTS = numbers(range(2), 10)
STEPS = max(8, len(RESTARTS) + 4)
GROWTH = "[[3,24],[6,48]]"
SIZES = [8] * 2 + [24] * 3 + [48] * (STEPS - 5)


def growing(config, run_dir, steps, num_ranks=1, **more):
    layout = {"parallel_pp": num_ranks, "batch_global": 8, "batch_micro": 4, "batch_growth": GROWTH}
    layout |= {"schedule_steps": STEPS, "run_preflight": "off"}
    layout |= {"run_steps": steps, "run_eval_every": 0, "run_eval_batches": 1}
    return run(num_ranks, config, run_dir, **layout, **more)


def read_tokens(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line["read"] for line in lines if line["step"]]


def test_restarts_in_a_row_have_the_bits_of_a_run_without(tmp_path):
    config = written(tmp_path, change=("[4, 3]", "[4, 3], [7, 1]"), documents=DOCUMENTS[:30])
    whole = growing(config, tmp_path / "whole", STEPS)
    assert whole.returncode == 0, tail(whole.output)
    assert read_tokens(tmp_path / "whole") == [16 * read for read in accumulate(SIZES)]
    dice = random.Random(58)
    stops = sorted(dice.sample(range(1, STEPS), len(RESTARTS)))
    for steps in (*stops, STEPS):
        done = growing(config, tmp_path / "again", steps, dice.choice((1, 2)))
        assert done.returncode == 0, tail(done.output)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    assert read_tokens(tmp_path / "again") == read_tokens(tmp_path / "whole")


def test_skipped_sequences_are_not_read(tmp_path):
    config = written(tmp_path)
    done = growing(config, tmp_path / "run", 4, data_skip="[[20,30],[40,41]]")
    assert done.returncode == 0, tail(done.output)
    places = []
    for step in range(1, 5):
        command = ("data", "show", str(tmp_path / "run"), "--step", str(step), "--json")
        shown = mpirun(1, MPITRAIN, *command)
        assert shown.returncode == 0, tail(shown.output)
        places += [sequence["sequence"] for sequence in json.loads(shown.output)["sequences"]]
    assert places == [*range(20), *range(30, 40), *range(41, 75)]
    later = growing(config, tmp_path / "run", 5, data_skip="[[20,30],[40,41],[90,99]]")
    assert later.returncode == 0, tail(later.output)
    refused = growing(config, tmp_path / "run", 6, data_skip="[[20,30]]")
    assert refused.returncode == 2 and "from sequence 40 on" in refused.output, tail(refused.output)


def test_what_is_wrong_with_a_growing_batch_is_refused_before_the_first_step(tmp_path):
    for keys, message in (
        ({"batch_growth": "[[3,15]]", "parallel_dp": 2}, "15 sequences from step 3 on don't divide"),
        ({"batch_growth": "[[3,16],[3,32]]"}, "found steps 1, 3, 3"),
        ({"data_skip": "[[9,3]]"}, "data.skip: found [9, 3]"),
    ):
        keys = {"batch_global": 8, "run_steps": 5, **keys}
        done = run(keys.get("parallel_dp", 1), written(tmp_path), tmp_path / "run", **keys)
        assert done.returncode == 2 and message in done.output, tail(done.output)
        assert not (tmp_path / "run").exists()

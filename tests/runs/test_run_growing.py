"""A batch and rows that grow, weights that change, a source that ends, an epoch's end: no bit changes
by restarts.

MPITRAIN_EFFORT=10 restarts ten times in a row, with packed documents, too; by default twice.
"""

import json
import random
import shutil
import sys
from itertools import accumulate
from pathlib import Path

import loss_spikes
import numpy as np
import pytest
from effort import numbers
from launch import MPITRAIN, mpirun, run_commands, run_tiny, tail, tiny, write_text
from test_run_mixture import DOCUMENTS, losses, run, written

from mpitrain.cluster.rundir import read_config
from mpitrain.data.tokenizer import load_tokenizer, vocabulary_of
from mpitrain.training.corpora import PreparedCorpus

RESTARTS = numbers(range(2), 10)
STEPS = max(8, len(RESTARTS) + 4)
WAYS = ("joined", "packed") if len(RESTARTS) > 2 else ("joined",)
GROWTH = '[["256",24],[6,48]]'  # from step 3 on: two steps have read so many tokens
LENGTHS = '[[1,4],[4,8],["1.5K",16]]'  # from step 7 on
SIZES = [8] * 2 + [24] * 3 + [48] * (STEPS - 5)


def growing(config, run_dir, steps, num_ranks=1, **more):
    layout = {"parallel_pp": num_ranks, "batch_global": 8, "batch_micro": 4, "batch_growth": GROWTH}
    layout |= {"batch_lengths": LENGTHS}
    layout |= {"schedule_steps": STEPS, "run_preflight": "off"}
    layout |= {"run_steps": steps, "run_eval_every": 0, "run_eval_batches": 1}
    return run(num_ranks, config, run_dir, **layout, **more)


# the last start of a run, from a script
STEPPED = """
import sys
from mpitrain import api
with api.open_run(sys.argv[2] + "/config.toml", f"run.dir={sys.argv[2]}", f"run.steps={sys.argv[3]}") as run:
    steps = [line["step"] for line in run.steps()]
    assert run.config.batch.growth and run.step == steps[-1]
print(steps)
"""


def events(run_dir, count):
    """Return what happens to the sources in the first sequences of a run."""
    config = read_config(run_dir / "config.toml")
    vocabulary = vocabulary_of(load_tokenizer("bytes"))
    train = PreparedCorpus(config, run_dir / "data", vocabulary, "feistel").corpora().train
    phases = [phase for phase in train.mixture.phases if phase.begin < count]
    places = train.mixture.places(np.arange(count))
    changes = {phase.shares.weights for phase in phases if len(phase.sources) == len(train.sizes)}
    found = {f"{len(changes)} changes of weights"}
    found |= {"a source ends"} if len(phases[-1].sources) < len(train.sizes) else set()
    over = (places.numbers >= np.array(train.sizes)[places.sources]).any()
    return found | ({"an epoch ends"} if over else set())


def read_tokens(run_dir):
    return [line["read"] for line in steps_of(run_dir)]


def steps_of(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"]]


@pytest.mark.parametrize("documents", WAYS)
def test_restarts_in_a_row_have_the_bits_of_a_run_without(tmp_path, documents):
    change = ("[4, 3]", '[4, 3], ["1.2K", 2], [8, 1]')  # the second from step 6 on
    config = written(tmp_path, change=change, documents=DOCUMENTS[:30])
    whole = growing(config, tmp_path / "whole", STEPS, data_documents=documents)
    assert whole.returncode == 0, tail(whole.output)
    assert read_tokens(tmp_path / "whole") == [16 * read for read in accumulate(SIZES)]
    assert events(tmp_path / "whole", sum(SIZES)) == {
        "a source ends",
        "an epoch ends",
        "3 changes of weights",
    }
    dice = random.Random(58)
    stops = sorted(dice.sample(range(1, STEPS), len(RESTARTS)))
    for steps in stops:
        done = growing(config, tmp_path / "again", steps, dice.choice((1, 2)), data_documents=documents)
        assert done.returncode == 0, tail(done.output)
    program = tmp_path / "stepped.py"
    program.write_text(STEPPED)
    stepped = mpirun(1, sys.executable, str(program), str(config), str(tmp_path / "again"), str(STEPS))
    assert stepped.returncode == 0, tail(stepped.output)
    assert stepped.output.splitlines()[-1] == str(list(range(stops[-1] + 1, STEPS + 1)))
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    assert read_tokens(tmp_path / "again") == read_tokens(tmp_path / "whole")


def test_sizes_of_steps_that_are_done_do_not_change(tmp_path):
    text = write_text(tmp_path / "text.txt")
    run_dir = tmp_path / "run"
    assert run_tiny(1, run_dir, text, run_steps=4, batch_growth="[[3,16]]").returncode == 0
    for changes in (
        {"batch_growth": "[[3,24]]"},
        {},
        {"batch_growth": "[[3,16]]", "batch_lengths": "[[4,8]]"},
    ):
        refused = run_tiny(1, run_dir, text, run_steps=6, **changes)
        assert refused.returncode == 2 and "one from step " in refused.output, tail(refused.output)
    later = {"batch_growth": "[[3,16],[5,24]]", "batch_lengths": "[[6,8]]"}
    done = run_tiny(1, run_dir, text, run_steps=6, **later)
    assert done.returncode == 0, tail(done.output)


def test_a_rollback_over_a_change_of_the_batch_reads_what_a_run_without_those_sequences_reads(tmp_path):
    text = write_text(tmp_path / "text.txt")
    keys = {
        "run_steps": 12,
        "run_save_every": 4,
        "run_keep": 9,
        "batch_growth": "[[10,16]]",
        "run_eval_every": 0,
    }
    keys |= {"optimizer_lr": 0.01, "schedule_name": "constant"}
    spikes = {"spikes_window": 4, "spikes_threshold": 3.0, "spikes_do": "rollback"}
    one, other = tmp_path / "one", tmp_path / "other"
    rolled = ("run", *tiny(one, text, **keys, **spikes))
    (done,) = run_commands(1, rolled, program=Path(loss_spikes.__file__), env={"NOISE": "[9,10]"})
    assert "rolled back to step 8, rollback 1" in done.output, tail(done.output)
    shutil.copytree(one, other)
    for step in (9, 12):
        shutil.rmtree(other / "checkpoints" / f"step-{step:08d}")
    # steps 9 and 10 had sequences 64 to 87
    again = run_tiny(1, other, text, **keys, data_skip="[[64,88]]")
    assert again.returncode == 0, tail(again.output)
    assert [line["loss"] for line in steps_of(one)] == [line["loss"] for line in steps_of(other)]
    assert [line["read"] // 32 for line in steps_of(one)][8:] == [96, 112, 128, 144]


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
        ({"batch_growth": '[["256",16],[3,32]]'}, "found steps 1, 3, 3"),
        ({"batch_growth": '[["soon",16]]'}, "found 'soon'"),
        ({"batch_lengths": "[[1,5]]"}, "data.sequence = 16 doesn't divide into rows of 5 tokens"),
        ({"batch_lengths": "[[1,2]]", "parallel_cp": 2}, "batch.lengths, rows of 2 tokens: "),
        ({"data_skip": "[[9,3]]"}, "data.skip: found [9, 3]"),
        ({"data_skip": "[[0,5],[3,8]]"}, "data.skip: found [0, 5], [3, 8]"),
        ({"data_skip": f"[[0,{2**63 - 1}]]"}, "data.skip: found [0, "),
    ):
        keys = {"batch_global": 8, "run_steps": 5, **keys}
        done = run(
            max(keys.get("parallel_dp", 1), keys.get("parallel_cp", 1)),
            written(tmp_path),
            tmp_path / "run",
            **keys,
        )
        assert done.returncode == 2 and message in done.output, tail(done.output)
        assert not (tmp_path / "run").exists()

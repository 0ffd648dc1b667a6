"""What ZeRO-3 does with weights, and how long the tail is, follows from links between nodes, and
changes no bit.

Two nodes are made of one by comm.node_ranks; with MPITRAIN_NETNS=1, two hosts of network
namespaces.
"""

import re
import tomllib

import hosts
import pytest
from conftest import LONG
from launch import MPITRAIN, loss_lines, mpirun, run_commands, tail, tiny, write_text

# tokens: to fetch the weights for them takes longer than to compute
FEW = {"data_sequence": 4, "batch_global": 2, "batch_micro": 1}
MANY = {"data_sequence": 256, "batch_global": 8, "batch_micro": 1}
STEPS = {"run_steps": 3, "run_eval_every": 0, "run_eval_batches": 1, "run_preflight": "off"}


def chosen(output):
    """Return the keys that a run told it has chosen."""
    said = [re.match(r"(\S+) = ([^:\s]+): ", line) for line in output.splitlines()]
    return {found[1]: found[2] for found in said if found and found[1] in KEYS}


KEYS = "parallel.gather", "pipeline.tail"


def test_the_choice_is_reported_and_gives_the_same_bits(tmp_path):
    text = write_text(tmp_path / "text.txt")
    runs = {
        "few": {**FEW, "parallel_zero": 3, "comm_node_ranks": 1},
        "few, said": {
            **FEW,
            "parallel_zero": 3,
            "comm_node_ranks": 1,
            "parallel_gather": "use",
            "pipeline_tail": 1,
        },
        "many": {**MANY, "parallel_zero": 3, "comm_node_ranks": 1},
        "many, on one node": {**MANY, "parallel_zero": 3},
        "only the tail": {**MANY, "parallel_zero": 1, "comm_node_ranks": 1},
    }
    every = dict(STEPS, parallel_dp=2, parallel_reduce="step")
    commands = [("run", *tiny(tmp_path / name, text, **every, **keys)) for name, keys in runs.items()]
    done = dict(zip(runs, run_commands(2, *commands)))
    assert all(each.returncode == 0 for each in done.values()), {
        name: tail(each.output) for name, each in done.items()
    }
    assert chosen(done["few"].output) == {"parallel.gather": '"step"', "pipeline.tail": "1"}, done[
        "few"
    ].output
    assert chosen(done["many"].output) == {"parallel.gather": '"use"', "pipeline.tail": "4"}, done[
        "many"
    ].output
    assert chosen(done["only the tail"].output).keys() == {"pipeline.tail"}, done["only the tail"].output
    for name in ("few, said", "many, on one node"):
        assert not chosen(done[name].output), done[name].output
        assert "exchange of data ranks" not in done[name].output, done[name].output
    assert loss_lines(tmp_path / "few") == loss_lines(tmp_path / "few, said")
    assert (
        loss_lines(tmp_path / "many")
        == loss_lines(tmp_path / "many, on one node")
        == loss_lines(tmp_path / "only the tail")
    )


@LONG
def test_what_was_left_open_stays_so_for_the_next_start(tmp_path):
    """config.toml has what its user wrote, not what was chosen: the next start may be on other nodes."""
    text = write_text(tmp_path / "text.txt")
    keys = {**MANY, **STEPS, "parallel_dp": 2, "comm_node_ranks": 1}
    first = mpirun(2, MPITRAIN, "run", *tiny(tmp_path / "run", text, **keys))
    written = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    again = mpirun(2, MPITRAIN, "run", str(tmp_path / "run/config.toml"), "--set", "run.steps=4")
    assert (first.returncode, again.returncode) == (0, 0), tail(first.output) + tail(again.output)
    assert written["pipeline"].get("tail", 0) == 0 and written["parallel"]["gather"] == "auto"
    assert chosen(again.output).keys() == chosen(first.output).keys() == {"pipeline.tail"}


def test_what_is_open_on_one_rank_and_said_on_another_is_refused(tmp_path):
    text = write_text(tmp_path / "text.txt")
    common = (
        MPITRAIN,
        "run",
        *tiny(tmp_path / "run", text, **MANY, **STEPS, parallel_dp=2, comm_node_ranks=1),
    )
    done = mpirun(1, *common, ":", "-n", "1", *common, "--set", "pipeline.tail=4", forked=False)
    assert done.returncode == 2 and "tail" in done.output and not (tmp_path / "run").exists(), tail(
        done.output
    )


@LONG
def test_nothing_is_measured_where_data_ranks_exchange_within_nodes(tmp_path):
    """Stages are on two nodes of two ranks each; one with a backward of one part, too."""
    text = write_text(tmp_path / "text.txt")
    keys = {**FEW, **STEPS, "parallel_zero": 3}
    cut = {"data_sequence": 8, "batch_global": 4, "parallel_dp": 4, "pipeline_schedule": "seq1f1b"}
    commands = [
        ("run", *tiny(tmp_path / "stages", text, **keys, parallel_pp=2, comm_node_ranks=2)),
        ("run", *tiny(tmp_path / "segments", text, **keys | cut, comm_node_ranks=2)),
    ]
    stages, segments = run_commands(4, *commands)
    assert stages.returncode == 0, tail(stages.output)
    assert not chosen(stages.output), tail(stages.output)
    assert "exchange of data ranks" not in stages.output, tail(stages.output)
    assert segments.returncode == 0 and chosen(segments.output).keys() == {"parallel.gather"}, tail(
        segments.output
    )


@pytest.mark.skipif(not hosts.CHOSEN, reason="MPITRAIN_NETNS=1 makes two hosts of network namespaces")
def test_over_a_slow_link_weights_are_kept(tmp_path):
    text = write_text(tmp_path / "text.txt")
    with hosts.two_hosts(tmp_path, "100mbit") as pair:
        keys = {**MANY, **STEPS, "parallel_dp": 2, "parallel_zero": 3, "parallel_reduce": "step"}
        done = mpirun(
            0,
            *pair.mpirun(1, MPITRAIN, "run", *tiny(tmp_path / "run", text, **keys)),
            env={"UCX_TLS": "tcp,self"},
        )
    assert done.returncode == 0 and chosen(done.output) == {
        "parallel.gather": '"step"',
        "pipeline.tail": "4",
    }, tail(done.output)

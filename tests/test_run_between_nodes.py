"""What ZeRO-3 does with weights, and how long the tail is, follows from links between nodes, and changes no bit.

Two nodes are made of one by comm.node_ranks; with MPITRAIN_NETNS=1, two hosts of network namespaces.
"""

import hosts
import pytest
from launch import MPITRAIN, loss_lines, mpirun, several, tail, tiny, write_text

FEW = {"data_sequence": 4, "batch_global": 2}  # tokens: to fetch the weights for them takes longer than to compute
MANY = {"data_sequence": 256, "batch_global": 8}
STEPS = {"run_steps": 3, "run_eval_every": 0, "run_eval_batches": 1, "run_preflight": "off"}


def chosen(output):
    """Return the keys that a run told it has chosen."""
    return {key: line.split(" = ")[1].split(":")[0] for line in output.splitlines() for key in KEYS if line.startswith(f"{key} = ")}


KEYS = "parallel.gather", "pipeline.tail"


def test_the_choice_is_told_and_gives_the_same_bits(tmp_path):
    text = write_text(tmp_path / "text.txt")
    runs = {
        "few": {**FEW, "parallel_zero": 3, "comm_node_ranks": 1},
        "few, said": {**FEW, "parallel_zero": 3, "comm_node_ranks": 1, "parallel_gather": "use", "pipeline_tail": 1},
        "many": {**MANY, "parallel_zero": 3, "comm_node_ranks": 1},
        "many, on one node": {**MANY, "parallel_zero": 3},
        "only the tail": {**MANY, "parallel_zero": 1, "comm_node_ranks": 1},
    }
    commands = [("run", *tiny(tmp_path / name, text, parallel_dp=2, **STEPS, **keys)) for name, keys in runs.items()]
    done = dict(zip(runs, several(2, *commands)))
    assert all(each.returncode == 0 for each in done.values()), {name: tail(each.output) for name, each in done.items()}
    assert chosen(done["few"].output) == {"parallel.gather": '"step"', "pipeline.tail": "1"}, done["few"].output
    assert chosen(done["many"].output) == {"parallel.gather": '"use"', "pipeline.tail": "4"}, done["many"].output
    assert chosen(done["only the tail"].output).keys() == {"pipeline.tail"}, done["only the tail"].output
    for name in ("few, said", "many, on one node"):
        assert not chosen(done[name].output) and "exchange of data ranks" not in done[name].output, done[name].output
    assert loss_lines(tmp_path / "few") == loss_lines(tmp_path / "few, said")
    assert loss_lines(tmp_path / "many") == loss_lines(tmp_path / "many, on one node") == loss_lines(tmp_path / "only the tail")


@pytest.mark.skipif(not hosts.CHOSEN, reason="MPITRAIN_NETNS=1 makes two hosts of network namespaces")
def test_over_a_slow_link_weights_are_kept(tmp_path):
    text = write_text(tmp_path / "text.txt")
    with hosts.two_hosts(tmp_path, "100mbit") as pair:
        keys = {**MANY, **STEPS, "parallel_dp": 2, "parallel_zero": 3}
        done = mpirun(0, *pair.mpirun(1, MPITRAIN, "run", *tiny(tmp_path / "run", text, **keys)), env={"UCX_TLS": "tcp,self"})
    assert done.returncode == 0 and chosen(done.output) == {"parallel.gather": '"step"', "pipeline.tail": "4"}, tail(done.output)

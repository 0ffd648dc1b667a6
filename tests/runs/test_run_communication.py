"""What a run says about its communication.

In every line of metrics.jsonl, in a table at its end, and beforehand.
"""

import json
import re

import pytest
from conftest import LONG
from launch import run_commands, run_tiny, tail, tiny, write_text


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt")


def steps_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]


def test_each_step_reports_what_rank_0_sent_and_the_end_what_all_did(tmp_path, text):
    """8 microbatches of one sequence of 32 tokens, width 32.

    So many activations go one way, so many gradients come back.
    """
    done = run_tiny(2, tmp_path / "run", text, parallel_pp=2, batch_micro=1, run_steps=4, run_eval_every=2)
    assert done.returncode == 0, tail(done.output)
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 4
    for step in steps:
        links = step["comm"]["links"]
        assert (links["calls"], links["bytes"]) == (16, 8 * 32 * 32 * 4)
        assert (
            0 <= links["blocked_s"] <= step["step_s"]
            and links["overlapped_s"] <= step["step_s"] - links["blocked_s"] + 1e-3
        )
        assert set(step["comm"]) == {"links", "model", "tied"}
        assert set(step["waited_for"]) <= {"1"} and sum(step["waited_for"].values()) <= step["step_s"]
    header, *rows = done.output.split("communication per step and rank (mean of 3 steps):\n")[1].splitlines()[
        :4
    ]
    assert header.split() == [
        "axis",
        "calls",
        "MB",
        "sent",
        "blocked",
        "ms",
        "worst",
        "rank",
        "overlapped",
        "ms",
        "hidden",
    ]
    assert [row.split()[0] for row in rows] == ["links", "model", "tied"]
    legend = done.output.split(f"{rows[-1]}\n")[1].splitlines()[:3]
    assert [line.partition(":")[0].strip() for line in legend] == [
        "links",
        "model",
        "tied",
    ] and "between pipeline ranks" in legend[0]
    assert re.fullmatch(r" *links +16 +0\.0328 +[\d.]+ +[\d.]+ \([01]\) +[\d.]+ +\d+%", rows[0]), rows[0]


def test_the_same_is_known_before(tmp_path):
    """24 microbatches of one sequence of 128 tokens, width 128, in fp32."""
    layout = ("--ranks", "4", "--set", "parallel.pp=2", "--set", "parallel.tp=2")
    rank = ("program", *layout, "--rank", "1")
    plain, done, refused = run_commands(0, rank, (*rank, "--traffic"), ("program", *layout, "--traffic"))
    assert done.returncode == 0 and done.output.startswith(plain.output.rstrip()), done.output
    rows = [
        line.split()[1:] for line in done.output[len(plain.output) :].splitlines() if line.startswith("#   ")
    ]
    assert ["links", "2", "send", "24", "0.786", "0.786"] in rows and [
        "links",
        "2",
        "receive",
        "24",
        "0.786",
        "0",
    ] in rows, rows
    assert refused.returncode == 2 and "--rank" in refused.output, refused.output


TRANSPORTS = ("auto", "shared", "messages", "collectives")


@LONG
def test_what_is_gathered_for_a_validation_a_save_or_the_end_is_a_step_s(tmp_path, text):
    """Weights that are sent at the end of a step are read in the next one, or by what comes before it.

    As much was known before.

    With transport `shared`, and `auto`, bytes are counted where they are read.
    """
    keys = dict(parallel_dp=2, parallel_zero=1, model_width=64, model_ffn=192, run_steps=7)
    # what comes between two steps
    keys |= dict(run_eval_every=3, run_save_every=4, numerics_check_every=5)
    runs = {name: tiny(tmp_path / name, text, **keys, comm_transport=name) for name in TRANSPORTS}
    ended = run_commands(2, *(("run", *given) for given in runs.values()))
    before = run_commands(
        0, *(("program", "--ranks", "2", "--rank", "0", "--traffic", *given) for given in runs.values())
    )
    for name, done, known in zip(runs, ended, before):
        assert done.returncode == known.returncode == 0, tail(done.output + known.output)
        steps = steps_of(tmp_path / name)
        rows = [
            line.split()[1:]
            for line in known.output.splitlines()
            if line.startswith("#   ") and " shard " in line
        ]
        expected = sum(float(row[-1]) for row in rows)  # MB
        sent = [step["comm"]["shard"]["bytes"] / 1e6 for step in steps]
        assert abs(sum(sent) / 7 - expected) < 0.01 * expected, (name, sent, expected)
        # so that the table has no other step's
        assert abs(sent[0] - expected) < 0.01 * expected, (name, sent)
        (row,) = re.findall(r"^ *shard .*$", done.output, re.MULTILINE)
        assert abs(float(row.split()[2]) - expected) < 0.01 * expected, (name, row, expected)
        said = (
            "on one node: sums and gathers"
            if name in ("auto", "shared")
            else f'comm.transport = "{name}", by '
        )
        assert said in known.output, known.output

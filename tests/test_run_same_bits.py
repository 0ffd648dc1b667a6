"""Thirty steps of the real command give the same bits for every layout, schedule, transport and repetition.

Only what changes the order of additions may change bits: the number of data-parallel ranks. So there is one reference for each
number of them; pipeline stages, schedules and transports must not show.
"""

import json
import math

import pytest
from conftest import EVERY
from launch import loss_lines, run_tiny, tail, write_text


@pytest.fixture(scope="module")
def lines_of(tmp_path_factory):
    """Return a function that runs the tiny model and returns its loss lines; what ran before is not run again."""
    folder = tmp_path_factory.mktemp("same-bits")
    text = write_text(folder / "text.txt")
    ran = {}

    def run(dp, pp, **changes):
        key = json.dumps([dp, pp, changes])
        if key not in ran:
            run_dir = folder / f"run-{len(ran)}"
            done = run_tiny(dp * pp, run_dir, text, parallel_dp=dp, parallel_pp=pp, **{k: v for k, v in changes.items() if k != "again"})
            assert done.returncode == 0, tail(done.output)
            ran[key] = loss_lines(run_dir)
        return ran[key]

    return run


def test_the_reference_learns(lines_of):
    """Against equality of nothing: thirty finite steps, a validation every tenth, and a loss that falls."""
    lines = [json.loads(line) for line in lines_of(1, 1)]
    assert [line["step"] for line in lines] == list(range(31))
    assert [line["step"] for line in lines if "val_loss" in line] == [0, 10, 20, 30]
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["val_loss"] < 0.75 * lines[0]["val_loss"]
    assert len({line["loss"] for line in lines[1:]}) == 30
    assert [line["tokens"] for line in lines[1:]] == [8 * 32 * step for step in range(1, 31)]


def test_the_seed_shows(lines_of):
    assert lines_of(1, 1, run_seed=2)[1] != lines_of(1, 1)[1]


@pytest.mark.parametrize(
    ("pp", "schedule", "transport"),
    [
        (2, "1f1b", "collectives"),
        (4, "gpipe", "messages"),
        *([(2, "gpipe", "shared"), (4, "1f1b", "auto"), (2, "1f1b", "messages"), (2, "1f1b", "shared")] if EVERY else []),
    ],
)
def test_pipeline_equals_one_rank(lines_of, pp, schedule, transport):
    assert lines_of(1, pp, pipeline_schedule=schedule, comm_transport=transport) == lines_of(1, 1)


def test_second_run_equals_the_first(lines_of):
    assert lines_of(1, 1, again=True) == lines_of(1, 1)


@pytest.mark.parametrize(
    ("pp", "changes"),
    [(2, {"pipeline_stages": "[3,1]"}), *([(4, {"pipeline_schedule": "gpipe"})] if EVERY else [])],
    ids=["uneven", "gpipe"][: 1 + EVERY],
)
def test_untied_pipeline_equals_one_rank(lines_of, pp, changes):
    expected = lines_of(1, 1, model_tied="false")
    assert expected != lines_of(1, 1)
    assert lines_of(1, pp, model_tied="false", **changes) == expected


@pytest.mark.parametrize(("pp", "transport"), [(1, "shared"), (2, "auto"), *([(1, "collectives"), (4, "auto")] if EVERY else [])])
def test_data_parallel_pipeline_equals_data_parallel(lines_of, pp, transport):
    """With buckets of a few kilobytes: several reductions are under way at a time."""
    expected = lines_of(2, 1, comm_transport="messages", comm_bucket_mb=0.02)
    assert lines_of(2, pp, comm_transport=transport, comm_bucket_mb=0.02) == expected


def test_data_parallel_is_close_to_one_rank(lines_of):
    """Other additions, other bits; but the same training."""
    one, two = (
        [json.loads(line)["loss"] for line in lines_of(*dp_pp, **more)[1:]]
        for dp_pp, more in (
            ((1, 1), {}),
            ((2, 1), {"comm_transport": "messages", "comm_bucket_mb": 0.02}),
        )
    )
    assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.parametrize("changes", [{"pipeline_schedule": "zbv"}, {"memory_recompute": "full", "memory_offload": "activations"}], ids=str)
def test_products_that_onednn_makes_give_the_same_bits(lines_of, changes):
    """The tiny model's products are MKL's (mpitrain/model/linear.py); these are large enough for the other library."""
    large = {"model_width": 256, "model_heads": 4, "model_ffn": 512, "data_sequence": 160, "run_steps": 3}
    assert lines_of(1, 2, **large, **changes) == lines_of(1, 1, **large)

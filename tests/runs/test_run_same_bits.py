"""The real command gives the same bits for every layout, schedule, transport and repetition.

Four steps do; with MPITRAIN_EFFORT=all it is thirty, in more layouts.

Only what changes the order of additions may change bits: the number of data-parallel ranks. So
there is one reference for each number of them; pipeline stages, schedules and transports must not
show.
"""

import json
import math

import pytest
from conftest import EVERY, WITH_LONG
from launch import loss_lines, run_several, write_text

STEPS, EVAL_EVERY = (30, 10) if EVERY else (4, 2)
LARGE = {"model_width": 256, "model_heads": 4, "model_ffn": 512, "data_sequence": 160, "run_steps": 2}
BUCKETS = {"comm_bucket_mb": 0.02}  # several reductions are under way at a time

PIPELINES = [
    (2, {"pipeline_schedule": "1f1b", "comm_transport": "collectives"}),
    (4, {"pipeline_schedule": "gpipe", "comm_transport": "messages"}),
    (2, {"model_tied": "false", "pipeline_stages": "[3,1]"}),
    (2, {**LARGE, "pipeline_schedule": "zbv"}),
]
LONGER = [(2, {**LARGE, "memory_recompute": "full", "memory_offload": "activations"})]
MORE_PIPELINES = [
    (2, {"pipeline_schedule": "gpipe", "comm_transport": "shared"}),
    (4, {"pipeline_schedule": "1f1b", "comm_transport": "auto"}),
    (2, {"pipeline_schedule": "1f1b", "comm_transport": "messages"}),
    (2, {"pipeline_schedule": "1f1b", "comm_transport": "shared"}),
    (4, {"model_tied": "false", "pipeline_schedule": "gpipe"}),
]
DATA_PARALLEL = [(1, {"comm_transport": "shared", **BUCKETS}), (2, {"comm_transport": "auto", **BUCKETS})]
MORE_DATA_PARALLEL = [
    (1, {"comm_transport": "collectives", **BUCKETS}),
    (4, {"comm_transport": "auto", **BUCKETS}),
]
if EVERY or WITH_LONG:
    PIPELINES = PIPELINES + LONGER
if EVERY:
    PIPELINES = PIPELINES + MORE_PIPELINES
    DATA_PARALLEL = DATA_PARALLEL + MORE_DATA_PARALLEL
LENGTH = {"run_steps": STEPS, "run_eval_every": EVAL_EVERY}
REFERENCE = {"comm_transport": "messages", **BUCKETS}  # of two data-parallel ranks


def of_one_rank(changes):
    """Return the changes that one rank can have too: what makes another model, or another run."""
    return {key: value for key, value in changes.items() if key in (*LARGE, "model_tied")}


ONE_RANK = [{}, {"run_seed": 2}, {"again": True}, {"model_tied": "false"}, LARGE]
RUNS = [
    *((1, 1, changes) for changes in ONE_RANK),
    *((1, pp, changes) for pp, changes in PIPELINES),
    *((2, pp, changes) for pp, changes in [(1, REFERENCE), *DATA_PARALLEL]),
]


@pytest.fixture(scope="module")
def lines_of(tmp_path_factory):
    """Return a function that returns the loss lines of one of RUNS. All that need as many ranks run
    in the same ones.
    """
    folder = tmp_path_factory.mktemp("same-bits")
    text = write_text(folder / "text.txt")
    for num_ranks in sorted({dp * pp for dp, pp, _ in RUNS}):
        run_several(
            num_ranks,
            text,
            {
                folder / str(number): {
                    **LENGTH,
                    "parallel_dp": dp,
                    "parallel_pp": pp,
                    **{k: v for k, v in changes.items() if k != "again"},
                }
                for number, (dp, pp, changes) in enumerate(RUNS)
                if dp * pp == num_ranks
            },
        )
    return lambda dp, pp, **changes: loss_lines(folder / str(RUNS.index((dp, pp, changes))))


def test_the_reference_learns(lines_of):
    """Against equality of nothing: finite steps, validations between them, and a loss that falls."""
    lines = [json.loads(line) for line in lines_of(1, 1)]
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert [line["step"] for line in lines if "val_loss" in line] == list(range(0, STEPS + 1, EVAL_EVERY))
    assert all(math.isfinite(value) for line in lines for value in line.values())
    assert lines[-1]["val_loss"] < (0.75 if EVERY else 0.98) * lines[0]["val_loss"]
    assert len({line["loss"] for line in lines[1:]}) == STEPS
    assert [line["tokens"] for line in lines[1:]] == [8 * 32 * step for step in range(1, STEPS + 1)]


def test_the_seed_shows(lines_of):
    assert lines_of(1, 1, run_seed=2)[1] != lines_of(1, 1)[1]


@pytest.mark.parametrize(("pp", "changes"), PIPELINES, ids=str)
def test_pipeline_equals_one_rank(lines_of, pp, changes):
    """The tiny model's products are MKL's (mpitrain/kernels/products.py).

    The large one's are large enough for the other library.
    """
    assert lines_of(1, pp, **changes) == lines_of(1, 1, **of_one_rank(changes))


def test_second_run_equals_the_first(lines_of):
    assert lines_of(1, 1, again=True) == lines_of(1, 1)


def test_an_untied_model_is_another(lines_of):
    assert lines_of(1, 1, model_tied="false") != lines_of(1, 1)


@pytest.mark.parametrize(("pp", "changes"), DATA_PARALLEL, ids=str)
def test_data_parallel_pipeline_equals_data_parallel(lines_of, pp, changes):
    assert lines_of(2, pp, **changes) == lines_of(2, 1, **REFERENCE)


def test_data_parallel_is_close_to_one_rank(lines_of):
    """Other additions, other bits; but the same training."""
    one, two = (
        [json.loads(line)["loss"] for line in lines[1:]]
        for lines in (lines_of(1, 1), lines_of(2, 1, **REFERENCE))
    )
    assert one == pytest.approx(two, rel=1e-5)

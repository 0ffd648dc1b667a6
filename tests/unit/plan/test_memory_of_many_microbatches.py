"""The memory of a step of many microbatches is found from few: the same bytes as of playing them all."""

import random
import time

import pytest
from support.quick_schedules import NAMES

from mpitrain.commands.inspect import planned
from mpitrain.errors import MpitrainError
from mpitrain.plan.predict.memory import _played, predict
from mpitrain.plan.predict.process_memory import processes_memory
from mpitrain.plan.settings.recompute import with_every

SMALL = ("model.width=32", "model.heads=2", "model.ffn=48", "data.sequence=32", "batch.micro=1")


def random_layout(name, rnd):
    """Return options of a random layout of a schedule, and its number of ranks."""
    pp, dp = rnd.choice([1, 2, 2, 3, 4]), rnd.choice([1, 2])
    chunks = rnd.choice([2, 3]) if name.startswith(("interleaved", "looped")) else 1
    zero = rnd.choice([0, 1, 2, 3]) if dp > 1 else 0
    number = rnd.randint(5, 12) * pp + rnd.choice([0, 0, 1])
    options = [
        f"pipeline.schedule={name}",
        f"parallel.pp={pp}",
        f"parallel.dp={dp}",
        f"parallel.zero={zero}",
        f"batch.global={number * dp * (2 if name == 'dualpipe' else 1)}",
        f"model.layers={rnd.choice([1, 2]) * pp * max(2, chunks) + rnd.choice([0, 1])}",
        f"memory.recompute={rnd.choice(['none', 'full', 'selective', 'none' if zero == 3 else 'every-k'])}",
        f"memory.offload={rnd.choice(['none', 'none', 'activations', 'all'])}",
        f"comm.bucket_mb={rnd.choice([0.01, 0.1, 25])}",
        f"precision.compute={rnd.choice(['fp32', 'bf16'])}",
    ]
    options += [f"pipeline.chunks={chunks}"] * (chunks > 1)
    options += [f"pipeline.group={pp + 1}"] * (name.startswith("inter") and rnd.random() < 0.3)
    options += ["parallel.reduce=microbatch"] * (zero > 0 and rnd.random() < 0.3)
    options += [f"parallel.gather={rnd.choice(['use', 'step'])}"] * (zero == 3)
    return (*SMALL, *options), pp * dp


@pytest.mark.parametrize("name", NAMES)
def test_few_microbatches_show_what_all_hold(name):
    """On random layouts, to the byte. Those that are refused, and those of few, don't count."""
    rnd = random.Random(name)
    compared = 0
    while compared < 2:
        options, num_ranks = random_layout(name, rnd)
        try:
            plan = planned(None, options, num_ranks)
            all_played = [_played(plan, rank, None, False) for rank in range(plan.config.parallel.pp)]
        except MpitrainError:
            continue
        if plan.shortest is not plan:
            assert predict(plan) == all_played, options
            assert plan.config.memory.recompute != "every-k" or plan.stages == with_every(
                plan.stages, plan.table, plan.sizes
            ), options
            compared += 1


@pytest.mark.parametrize("options", [("numerics.reproducible=layout",), ("pipeline.schedule={}",)])
def test_all_are_played_where_a_schedule_may_not_repeat_itself(tmp_path, options):
    table = tmp_path / "own.txt"
    table.write_text("rank 0: " + " ".join(f"F{m}@0 B{m}@0" for m in range(96)))
    plan = planned(None, (*SMALL, "batch.global=96", *(text.format(table) for text in options)), 1)
    assert plan.num_microbatches == 96 and plan.shortest is plan


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_thousand_microbatches_cost_no_more_than_a_hundred(schedule):
    """The processor's time, and what is said; playing all of them takes ten times as long."""
    seconds = {}
    for number in (96, 960):
        plan = planned(None, (*SMALL, "model.layers=8", "parallel.pp=4", f"pipeline.schedule={schedule}",
                              f"batch.global={number}"), 4)  # fmt: skip
        begin = time.process_time()
        usages = predict(plan)
        processes_memory(plan, usages)
        seconds[number] = time.process_time() - begin
        assert "training" not in vars(plan), "all microbatches were played"
    assert seconds[960] < 3 * seconds[96] + 0.2, seconds

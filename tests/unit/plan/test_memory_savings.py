"""Every setting that claims to save memory, bytes or rounds does so in the prediction, in a grid of layouts.

A key of the tables that decide about memory is either walked here, or is named with what it is for
instead. MPITRAIN_EFFORT=all takes every model.
"""

from typing import NamedTuple

import pytest
from conftest import EVERY

from mpitrain import config as settings
from mpitrain.actor.rehearsal import Rehearsal
from mpitrain.config import Config, flatten
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.predict.link_choices import exchanged
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.promises import RECOMPUTE, ZERO, idle_axes, idle_values, most_bytes
from mpitrain.plan.predict.snapshot_bytes import copy_bytes
from mpitrain.plan.predict.speed_costs import costs
from mpitrain.plan.settings.resolve import resolve

BATCH = "batch.global=32", "batch.micro=1", "data.sequence=1024"
MODELS = {
    "llama": (
        *("model.layers=16", "model.width=1024", "model.heads=16", "model.kv_heads=8"),
        *("model.ffn=2816", "model.vocab=8192"),
    ),
    "small": ("model.preset=reference",),
    "llama3.2-1b": ("model.preset=llama3.2-1b",),
    "smollm2-135m": (
        *("model.preset=smollm2-135m", "model.heads=8", "model.kv_heads=4", "attention.head_width=72"),
    ),
    "llama3-8b": ("model.preset=llama3-8b",),
    "experts": (
        *("model.family=mixtral", "model.layers=8", "model.width=512", "model.heads=8", "model.kv_heads=4"),
        *("model.ffn=1024", "experts.count=8"),
    ),
    "tiny": ("model.layers=4", "model.width=64", "model.heads=4", "model.kv_heads=4", "model.ffn=128"),
}
DENSE = ("llama", "llama3.2-1b", "smollm2-135m", "llama3-8b") if EVERY else ("llama", "llama3.2-1b")
ALL = (*DENSE, "experts")
BF16 = "precision.compute=bf16"


class Saving(NamedTuple):
    """Values of a key, each of which saves more than the one before. common: with what.  models: of which."""

    key: str
    values: tuple
    ranks: int = 1
    common: str = ""
    models: tuple[str, ...] = ALL


def schedules(*names: str, common: str = "parallel.pp=4") -> Saving:
    return Saving("pipeline.schedule", names, 4, common, DENSE)


MEMORY = [
    Saving("parallel.zero", (0, 1, 2, 3), 4, f"parallel.dp=4 {BF16}"),
    Saving("parallel.zero", (0, 1, 2, 3), 4, f"parallel.dp=2 parallel.cp=2 {BF16} comm.bucket_mb=1", DENSE),
    Saving(
        *("parallel.zero", (0, 1, 2, 3), 8),
        *(f"parallel.dp=4 parallel.pp=2 pipeline.schedule=v-half {BF16}", DENSE),
    ),
    Saving("parallel.dp_shard", (1, 2, 4, 8), 8, "parallel.dp=8 parallel.zero=1"),
    Saving("parallel.dp_shard", (2, 4, 8), 8, f"parallel.dp=8 parallel.zero=3 {BF16}", DENSE),
    Saving("parallel.reduce", ("step", "microbatch"), 4, "parallel.dp=4 parallel.zero=2"),
    Saving("parallel.reduce", ("step", "microbatch"), 4, "parallel.dp=4 parallel.zero=3"),
    Saving(
        *("parallel.reduce", ("step", "microbatch"), 4),
        "parallel.dp=2 parallel.pp=2 pipeline.schedule=zb-h1 parallel.zero=2",
    ),
    Saving("parallel.gather", ("step", "use"), 4, "parallel.dp=4 parallel.zero=3"),
    Saving("parallel.ahead", (3, 2, 1), 4, "parallel.dp=4 parallel.zero=3"),
    Saving("parallel.tp", (1, 2, 4), 4, BF16, DENSE),
    Saving("parallel.tp", (1, 2, 4), 4, f"{BF16} parallel.zero=1", ("experts",)),
    Saving("parallel.cp", (1, 2, 4), 4, BF16, DENSE),
    Saving("parallel.pp", (1, 2, 4), 4, BF16, DENSE),
    *(Saving(f"parallel.{axis}", (1, 2), 2, "data.sequence=64", ("tiny",)) for axis in ("tp", "cp", "pp")),
    Saving("parallel.ep", (1, 2, 4), 4, "parallel.dp=4", ("experts",)),
    Saving("parallel.etp", (1, 2, 4), 4, "parallel.dp=4", ("experts",)),
    Saving("parallel.sequence", ("false", "true"), 4, "parallel.tp=4", DENSE),
    Saving("parallel.sequence", ("false", "true"), 4, "parallel.tp=4 memory.recompute=full", DENSE),
    Saving("parallel.regather", ("false", "true"), 4, "parallel.tp=4", DENSE),
    Saving("parallel.regather", ("false", "true"), 2, "parallel.tp=2 memory.recompute=selective"),
    schedules("gpipe", "1f1b", "v-half", "v-min"),
    schedules("gpipe", "1f1b", "seq1f1b"),
    schedules("zb-h2", "zb-h1"),
    schedules("interleaved", "1f1b"),
    schedules("zbv", "v-half", "v-min", common="parallel.pp=4 precision.compute=bf16"),
    Saving("pipeline.segments", (1, 2, 4), 2, "parallel.pp=2 pipeline.schedule=seq1f1b", DENSE),
    Saving(
        *("pipeline.group", (8, 4, 2), 2),
        *("parallel.pp=2 pipeline.schedule=interleaved pipeline.chunks=2", DENSE),
    ),
    Saving("pipeline.memory_limit", (8, 6, 4), 4, "parallel.pp=4 pipeline.schedule=zb-auto", DENSE),
    Saving("pipeline.tail", (4, 2, 1), 2, "parallel.dp=2 parallel.zero=1", DENSE),
    Saving("memory.recompute", ("none", "selective", "full"), 1, "", DENSE),
    Saving("memory.recompute", ("none", "selective", "full"), 4, f"parallel.pp=4 {BF16}", DENSE),
    Saving("memory.recompute", ("none", "every-k"), 2, "parallel.pp=2", DENSE),
    Saving("memory.every", (8, 0), 1, "memory.recompute=every-k", DENSE),
    Saving("memory.offload", ("none", "activations", "all"), 1, BF16, DENSE),
    Saving("memory.offload", ("none", "optimizer", "all"), 2, f"parallel.dp=2 parallel.zero=1 {BF16}", DENSE),
    Saving("precision.compute", ("fp64", "fp32"), 1, ""),
    Saving("optimizer.moments", ("fp32", "bf16"), 1, ""),
    Saving("optimizer.name", ("adamw", "muon", "sgd"), 1, "", DENSE),
    Saving("optimizer.name", ("adamw", "sgd"), 1, "", ("experts",)),
    Saving("optimizer.momentum", (0.9, 0), 1, "optimizer.name=sgd"),
    Saving("numerics.reproducible", ("layout", "run"), 2, "parallel.dp=2 parallel.zero=1"),
    Saving("experts.buffer", (4, 2, 1, 0.5), 4, "parallel.dp=4 parallel.ep=4", ("experts",)),
    Saving("batch.micro", (4, 2, 1), 1, ""),
    Saving("comm.levels", ("auto", "one"), 4, "parallel.dp=4 comm.node_ranks=2"),
    Saving("comm.bucket_mb", (32, 16, 8), 2, "parallel.dp=2 parallel.zero=2", ("small",)),
]
ACTIVATIONS = [
    Saving("precision.compute", ("fp32", "bf16", "fp8"), 1, "", DENSE),
    Saving("precision.compute", ("fp32", "fp16")),
]
COPIES = [Saving("run.save", ("background", "blocking"))]
BYTES = [
    Saving("precision.reduce", ("same", "bf16"), 4, "parallel.dp=4 parallel.zero=1"),
    Saving("precision.compute", ("fp32", "bf16"), 4, "parallel.dp=4 parallel.zero=3", DENSE),
    Saving("parallel.reduce", ("microbatch", "step"), 4, "parallel.dp=4 parallel.zero=2"),
    Saving("parallel.gather", ("use", "step"), 4, "parallel.dp=4 parallel.zero=3"),
    Saving(
        *("pipeline.tail", (1, 2, 4), 2),
        *("parallel.dp=2 parallel.zero=3 parallel.gather=use parallel.reduce=step", DENSE),
    ),
]
ROUNDS = [
    Saving("comm.bucket_mb", (4, 16, 64), 4, "parallel.dp=4 parallel.zero=1", ("small",)),
    Saving("parallel.reduce", ("microbatch", "step"), 4, "parallel.dp=4 parallel.zero=2"),
    Saving("parallel.gather", ("use", "step"), 4, "parallel.dp=4 parallel.zero=3"),
]
OF_EXPERTS = [Saving("experts.wire", ('""', "bf16", "fp8"), 4, "parallel.dp=4 parallel.ep=4", ("experts",))]
WALKED = (*MEMORY, *ACTIVATIONS, *COPIES, *BYTES, *ROUNDS, *OF_EXPERTS)
INSTEAD = {  # keys of the same tables that claim to save none of these
    "speed": {
        *("parallel.async_tp", "pipeline.pairs", "comm.progress", "comm.transport", "comm.device"),
        *("run.compile", "run.threads", "parallel.context"),
        "experts.dispatch",  # what crosses nodes: tests/ranks/test_experts_exchange.py
    },
    "size": {
        *(
            "parallel.dp",
            "batch.global",
            "batch.growth",
            "batch.lengths",
            "pipeline.chunks",
            "pipeline.stages",
            "pipeline.times",
            "pipeline.stage_times",
            "pipeline.trace",
        ),
        # with pipeline.memory_limit, to the byte: tests/ranks/test_train_recomputed.py
        *("pipeline.recompute", "pipeline.offload"),
        *("pipeline.weight_memory", "experts.count", "experts.active", "experts.shared", "experts.width"),
        *("experts.first", "experts.every"),
        "experts.capacity",  # a bound: equal loads are predicted
        "memory.limit_gb",  # by it a layout is chosen or refused: tests/runs/test_run_layout.py
    },
    "files": {"run.shards"},
    "sums": {
        *("precision.products", "numerics.deterministic", "numerics.check_every", "numerics.rerun_every"),
        *("experts.score", "experts.normalised", "experts.scale", "experts.groups"),
        *("experts.groups_active", "experts.balance", "experts.balance_weight", "experts.bias_rate"),
        *("experts.z_weight", "experts.replay"),
    },
    "diagnosis": {"comm.synchronous", "comm.timeout_s", "comm.slow_after", "comm.node_ranks"},
}
TABLES = "parallel", "pipeline", "memory", "precision", "numerics", "experts", "comm", "batch"


def plans_of(saving: Saving, model: str):
    given = *BATCH, *MODELS[model], *saving.common.split()
    for value in saving.values:
        config = settings.load(None, [*given, f"{saving.key}={value}"])
        yield plan_of(resolve(config, saving.ranks, 256))


def cases(savings: list[Saving]):
    every = [(saving, model) for saving in savings for model in saving.models]
    names = [f"{saving.key} {saving.values} {saving.common} {model}" for saving, model in every]
    return pytest.mark.parametrize(("saving", "model"), every, ids=names)


def falls(numbers: list) -> bool:
    return all(after < before for before, after in zip(numbers, numbers[1:]))


def said_of(saving: Saving, plans: list, held: list[int]) -> list[str]:
    """Return what a run and `mpitrain memory` say of the values that save nothing."""
    lines = [line for plan in plans for line in costs(plan)]
    lines += idle_axes(plans[-1])
    if saving.key == "parallel.zero":
        lines += idle_values(plans[0], ZERO, dict(zip(saving.values, held)))
    if saving.key == "memory.recompute":
        lines += idle_values(plans[-1], RECOMPUTE, dict(zip(saving.values, held)))
    return [line for line in lines if saving.key in line]


def test_every_key_that_decides_about_memory_is_walked_or_named():
    named = [key for keys in INSTEAD.values() for key in keys]
    keys = {key for key in flatten(Config()) if key.partition(".")[0] in TABLES}
    walked = {saving.key for saving in WALKED}
    assert len(named) == len(set(named)) and not walked & set(named)
    assert keys - walked - set(named) == set()
    assert walked | set(named) <= set(flatten(Config()))


@pytest.mark.few_cases(6)
@cases(MEMORY)
def test_memory_falls_in_the_order_that_is_claimed(saving, model):
    plans = list(plans_of(saving, model))
    held = [most_bytes(plan) for plan in plans]
    # both ends of a large vocabulary on one rank
    if saving.key == "pipeline.schedule" and not falls(held):
        held = [max(usage.activations for usage in predict(plan)) for plan in plans]
    assert falls(held) or said_of(saving, plans, held), held


@cases(ACTIVATIONS)
def test_activations_fall(saving, model):
    """What has 16 bits has masters, too: 18 bytes a parameter and not 16, which `mpitrain memory` says."""
    usages = [predict(plan)[0] for plan in plans_of(saving, model)]
    assert falls([usage.activations for usage in usages]), usages


@cases(COPIES)
def test_copies_in_host_memory_fall(saving, model):
    assert falls([copy_bytes(plan, 0) for plan in plans_of(saving, model)])


@cases(BYTES)
def test_bytes_fall(saving, model):
    every = [exchanged(plan, 0) for plan in plans_of(saving, model)]
    assert falls([each.weights.total() + each.gradients.total() for each in every]), every


@cases(ROUNDS)
def test_rounds_fall(saving, model):
    programs = [plan.training.ranks[0] for plan in plans_of(saving, model)]
    assert falls([sum(action.kind in ("REDUCE", "GATHER") for action in program) for program in programs])


@cases(OF_EXPERTS)
def test_bytes_of_rows_fall(saving, model):
    started = [Rehearsal(plan, 0).training()["experts"] for plan in plans_of(saving, model)]
    assert falls([sum(num_bytes for _, num_bytes in each) for each in started])

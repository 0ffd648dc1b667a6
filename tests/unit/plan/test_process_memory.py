"""What a process takes besides tensors: kernels of oneDNN, holes of the heap; and all as it was measured."""

import importlib.util
import re

import pytest
from folders import ROOT

from mpitrain import config as settings
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.expert_rows import num_lengths, padded
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.process_memory import HOLES, KERNEL, LIBRARY, memory_of_process, processes_memory
from mpitrain.plan.predict.snapshot_bytes import copy_bytes
from mpitrain.plan.settings.resolve import resolve

BF16 = "precision.compute=bf16"
DENSE = "model.layers=2", "model.width=64", "model.heads=4", "model.kv_heads=2", "model.ffn=96"
MIXTRAL = "model.family=mixtral", "model.layers=2", "model.width=256", "model.ffn=512", "experts.count=8"
ROW = re.compile(
    r"^    (\S.*?)  +(\d)  +([\d.]+)  +([\d.]+|-) +(?:[\d.]+|-) +([\d.]+|-) +(?:[\d.]+|-)$", re.M
)


def processes(*given, ranks=1):
    plan = plan_of(resolve(settings.load(None, given), ranks, 256))
    usages = predict(plan)
    found = processes_memory(plan, usages)
    assert found == [memory_of_process(plan, rank, usage) for rank, usage in enumerate(usages)]
    return found


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_of_memory", ROOT / "benchmarks" / "memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_of_zeros_make_few_shapes_of_many():
    numbers = range(1, 4097)
    assert all(number <= padded(number) < max(number + 32, 1.26 * number) for number in numbers)
    assert len({padded(number) for number in numbers}) <= 25


@pytest.mark.parametrize(("fewest", "most"), [(0, 1), (1, 32), (31, 33), (60, 700), (300, 3000)])
def test_lengths_are_counted_as_they_are_padded(fewest, most):
    assert num_lengths(fewest, most) == len({padded(n) for n in range(max(1, fewest), most + 1)})


@pytest.mark.parametrize(
    ("given", "ranks", "shapes"),
    [
        # queries and outputs, keys and values, gate and up, down, logits; each in three directions
        ((*DENSE, BF16), 1, [15]),
        (DENSE, 1, [0]),
        (("precision.compute=fp16", *DENSE), 1, [15]),
        # logits are the last stage's
        ((*DENSE, BF16, "parallel.pp=2"), 2, [12, 15]),
        # an untied head has the shape of the table of logits
        ((*DENSE, BF16, "model.tied=false"), 1, [15]),
        # divided: queries [32, 64], outputs [64, 32], keys [16, 64], up [48, 64], down [64, 48], logits
        ((*DENSE, BF16, "parallel.tp=2"), 2, [18]),
    ],
)
def test_a_kernel_is_kept_of_each_shape_in_16_bits(given, ranks, shapes):
    assert [each.kernels for each in processes(*given, ranks=ranks)] == [KERNEL * n for n in shapes]


def test_experts_multiply_as_many_shapes_as_rows_come_in_lengths():
    def kept(*more, ranks=1):
        return processes(*MIXTRAL, BF16, "data.sequence=256", *more, ranks=ranks)[0].kernels

    # 256 rows of each expert, from 64 to 640: twelve lengths, of [512, 256] and of [256, 512]
    few, many = kept("batch.micro=1", "batch.global=8"), kept("batch.micro=4", "batch.global=8")
    assert many - few == KERNEL * 3 * 2 * (num_lengths(64, 640) - num_lengths(16, 160)) > 0
    # half of the hidden units: up and down are of one shape
    assert kept("batch.micro=4", "batch.global=8", "parallel.tp=2", "parallel.etp=2", ranks=2) < many


def test_what_is_copied_to_the_host_leaves_holes_too():
    """Masters and moments that are there don't."""
    given = *DENSE, "batch.micro=4", "optimizer.name=adamw"
    found = {}
    for offload in ("activations", "optimizer", "all"):
        plan = plan_of(resolve(settings.load(None, (*given, f"memory.offload={offload}")), 1, 256))
        usage = predict(plan)[0]
        found[offload] = usage, memory_of_process(plan, 0, usage).holes - HOLES
    copied, holes = found["activations"]
    assert holes == int(0.5 * (copied.computed + copied.host)) == found["all"][1]
    kept, fewer = found["optimizer"]
    assert fewer == int(0.25 * kept.computed) and kept.host > 0


@pytest.mark.parametrize(
    ("given", "ranks", "share"),
    [
        ((), 1, 0.25),
        ((BF16,), 1, 0.5),
        (("parallel.tp=2",), 2, 0.5),
        (("parallel.tp=2", BF16), 2, 0.75),
        (("parallel.dp=2", "parallel.zero=3"), 2, 0.25),
    ],
)
def test_holes_are_a_share_of_what_is_computed(given, ranks, share):
    plan = plan_of(resolve(settings.load(None, (*DENSE, *given)), ranks, 256))
    usage = predict(plan)[0]
    assert memory_of_process(plan, 0, usage).holes == HOLES + int(share * usage.computed)


LIKE = {
    "fp32": ((*DENSE, "batch.micro=4"), 1),
    "bf16 tp=2": ((*DENSE, "batch.micro=4", BF16, "parallel.tp=2"), 2),
    "experts bf16": ((*MIXTRAL, "batch.micro=4", BF16), 1),
    "pp=2": ((*DENSE, "model.layers=4", "parallel.pp=2"), 2),
}


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize(("given", "ranks"), LIKE.values(), ids=LIKE)
def test_what_is_recomputed_leaves_as_many_holes_as_is_dropped_and_a_process_takes_less(given, ranks, mode):
    def usage_and_holes(*more):
        plan = plan_of(resolve(settings.load(None, (*given, *more)), ranks, 256))
        usage = predict(plan)[0]
        return usage, memory_of_process(plan, 0, usage).holes - HOLES

    whole, before = usage_and_holes()
    usage, holes = usage_and_holes(f"memory.recompute={mode}")
    share = before / whole.computed
    dropped = whole.computed - usage.computed
    assert holes == pytest.approx(share * usage.computed + min(dropped, usage.computed / 2), abs=2)
    assert sum(usage) + holes < sum(whole) + before


def test_predictions_of_the_benchmark_are_within_15_percent_of_what_was_measured(benchmark):
    """Of each row and processor: growth of a process, in MB."""
    rows = {name: (predicted, *found) for name, _, predicted, *found in ROW.findall(benchmark.MEASURED)}
    assert rows.keys() == benchmark.CASES.keys()
    wrong = []
    for name, (ranks, given) in benchmark.CASES.items():
        plan = plan_of(resolve(settings.load(None, ("run.eval_batches=1", *given)), ranks, 256))
        usage = predict(plan)[0]
        whole = sum(usage) + copy_bytes(plan, 0) + sum(memory_of_process(plan, 0, usage))
        expected = (whole - LIBRARY) / 1e6
        stated, *measured = rows[name]
        assert float(stated) == pytest.approx(expected, rel=0.002), name  # as the table says it
        off = [float(each) / expected for each in measured if each != "-"]
        wrong += [(name, ratio) for ratio in off if not 0.85 <= ratio <= 1.15]
    assert not wrong, wrong

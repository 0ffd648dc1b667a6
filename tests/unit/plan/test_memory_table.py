"""What `mpitrain memory` says.

Every part of a process, bytes a parameter, whether it fits, and the cheapest change that does.
"""

import math
import mmap
import re
from collections import Counter

import pytest
from conftest import LONG

from mpitrain import config as settings
from mpitrain.cluster.resident import peak_resident, resident
from mpitrain.commands.inspect import show_memory, show_program, show_proof
from mpitrain.errors import ConfigError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.predict.bucket_buffers import held_by
from mpitrain.plan.predict.memory import predict
from mpitrain.plan.predict.memory_limit import MemoryLimit
from mpitrain.plan.predict.memory_table import compare, compared, fit_line, parameter_line
from mpitrain.plan.predict.process_memory import ON_A_GPU, ProcessMemory, processes_memory
from mpitrain.plan.predict.staged_bytes import staged_bytes
from mpitrain.plan.settings.resolve import resolve

BF16 = "precision.compute=bf16"
NO_MORE = ProcessMemory(0, 0, 0, 0)


def planned(*given, ranks=1):
    return plan_of(resolve(settings.load(None, given), ranks, 256))


def test_every_part_of_a_process_has_a_row():
    given = "parallel.dp=2", "parallel.pp=2", "parallel.zero=3", BF16, "memory.recompute=full"
    text = show_memory(None, given, 4)
    for row in (
        "weights",
        "gradients",
        "moments",
        "gathered",
        "unreduced",
        "activations",
        "recomputed",
        "working",
        "messages",
        "library",
        "lazy initialization",
        "kernels",
        "fragmentation",
    ):
        assert f"\n  {row}" in text, row
    assert "by parallel.zero: " in text and "by memory.recompute: " in text and "and fit, with" in text


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ((), "16 bytes each: weight 4, gradient 4, moments 8"),
        (
            (BF16,),
            "18 bytes each: weight 2, its master 4, gradient 4, moments 8; 2 less with 16-bit gradients",
        ),
        ((BF16, "optimizer.moments=bf16"), "14 bytes each"),
        (("optimizer.name=sgd", "optimizer.momentum=0"), "8 bytes each"),
    ],
)
def test_bytes_of_a_parameter_are_what_its_state_takes(given, begins):
    plan = planned("parallel.zero=0", "model.preset=smollm2-135m", *given)
    assert begins in parameter_line(plan)
    usage = predict(plan)[0]
    count = sum(spec.numel for spec in plan.parameters())
    stated = int(parameter_line(plan).split(" parameters, ")[1].split()[0])
    # buffers are padded, tied gradients two
    assert 1 <= (usage.weights + usage.gradients + usage.moments) / (stated * count) < 1.15


def test_what_does_not_fit_says_by_how_much():
    plan = planned("model.preset=smollm2-135m", "parallel.dp=2", "parallel.zero=0", ranks=2)
    usages = predict(plan)
    held = [sum(usages[0]) + sum(processes_memory(plan, usages)[0])]
    needed = 2 * held[0]
    asked = []

    def said(found):
        limit = MemoryLimit(found, False, False, "this node", 2, of_node=True)
        return fit_line(held, limit, lambda limit: asked.append(limit) or "parallel.zero = 1")

    assert f"fit, with {1.0:,.2f} MB to spare" in said(needed + 1_000_000) and not asked
    too_much = said(needed - 900_000_000)
    assert "900.00 MB too much on one node" in too_much and too_much.endswith("; parallel.zero = 1")
    assert asked[0].total_bytes == needed - 900_000_000


OF_80_GB = ("run.machine=h100-80gb", "model.preset=llama3.1-8b", "parallel.dp=8")


def test_a_layout_is_judged_by_the_memory_of_the_machine_that_is_named():
    """70 GB fit into 80, whatever this computer has; 130 don't, and ZeRO-1 helps."""
    (fits,) = re.findall("^memory limit: the 85.9 GB .*", show_memory(None, OF_80_GB, 8), re.M)
    assert "(run.machine); the rank with most memory needs 73," in fits and "MB and fits" in fits
    text = show_memory(None, (*OF_80_GB, "parallel.zero=0"), 8)
    assert "MB too much; the cheapest change that fits: parallel.zero = 1\n" in text


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("show", [show_proof, lambda *words: show_program(*words, None)])
@pytest.mark.parametrize("limit", ["run.machine=h100-80gb", "memory.limit_gb=85"])
def test_a_layout_that_is_given_has_to_fit_into_the_machine_that_is_named(show, limit):
    keys = (limit, *OF_80_GB[1:], "run.device=cuda")
    with pytest.raises(ConfigError, match=r"holds 130 GB .* fits: parallel\.zero = 1$"):
        show(None, (*keys, "parallel.zero=0"), 8)
    with pytest.raises(ConfigError, match=r"holds 641 GB .* take more ranks, divide the model further"):
        show(None, (*keys, "model.preset=llama3.1-70b"), 8)


def test_a_gpu_that_nobody_looked_at_is_not_judged_by_this_computers_memory():
    text = show_memory(None, (*OF_80_GB[1:], "run.device=cuda"), 8)
    assert "whether it fits is unknown" in text and "too much" not in text


def test_nodes_are_those_of_the_machine_that_is_named():
    given = "run.machine=h100-80gb", "parallel.tp=16", "model.preset=llama3.1-8b", "run.device=cuda"
    assert "is beyond a node of 8 ranks" in show_proof(None, given, 16)
    assert "is beyond a node of 4 ranks" in show_proof(None, (*given, "comm.node_ranks=4"), 16)


def test_the_table_at_the_end_has_the_peak_of_the_process_next_to_its_prediction():
    usage = predict(planned())[0]
    more = usage._replace(activations=1_000_000)
    text = compare(compared(usage, more, (0, 0), NO_MORE, 170_000_000, 180_000_000))
    activations = next(line for line in text.splitlines() if "activations" in line)
    last = text.splitlines()[-1]
    assert activations.split()[-2:] == [f"{usage.activations / 1e6:,.2f}", "1.00"]
    assert last.split()[-1] == "180.00" and "peak resident" in last
    assert compare(compared(usage, usage, (0, 0), NO_MORE, None, None)).splitlines()[-1].split()[-1] == "-"


def test_on_a_gpu_a_process_takes_of_its_host_what_is_there_alone():
    usage = predict(planned(BF16), on_gpu=True)[0]._replace(host=5_000_000)
    copies = 2_000_000, 2_000_000
    lines = compare(compared(usage, usage, copies, ON_A_GPU, 430_000_000, 1_258_850_000, True)).splitlines()
    # of the H200 that the constants are of: quickstart, with its copy of 14.57 MB
    assert lines[-1].split()[-2:] == ["1,265.00", "1,258.85"]


H200_GIVEN = (
    "model.preset=llama3.2-1b", "batch.global=64", "batch.micro=4", "data.sequence=2048", BF16,
)  # fmt: skip


@LONG
def test_messages_that_are_staged_take_what_an_h200_s_host_had():
    """18,702.81 MB of each of two ranks, 2026-11-26; the snapshot is rounded up there, too."""
    text = show_memory(None, (*H200_GIVEN, "parallel.zero=1"), 2)
    staged = next(line for line in text.splitlines() if "messages staged there" in line).split()[-1]
    assert float(staged.replace(",", "")) == pytest.approx(18_702.81, rel=0.12)
    assert "staged" not in show_memory(None, (*H200_GIVEN, "comm.device=direct"), 2)
    assert "staged" not in show_memory(None, H200_GIVEN, 1)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_staged_copies_are_the_blocks_of_all_gradients_then_of_all_weights(zero):
    plan = planned(*H200_GIVEN, f"parallel.zero={zero}", "parallel.dp=2", ranks=2)
    buckets = [bucket for stage in held_by(plan, 0).values() for bucket in stage.buckets]
    lengths = [bucket.weights.length for bucket in buckets if bucket.weights.length]

    def block(num_bytes):
        return 2 ** math.ceil(math.log2(num_bytes))

    whole, halves = ([block(4 * n // parts) for n in lengths] for parts in (1, 2))
    sums = Counter(whole + halves if zero else whole)
    weights = Counter(block(2 * n) for n in lengths) if zero in (1, 2) else Counter()
    assert staged_bytes(plan, 0) == sum(size * count for size, count in (sums | weights).items())


def test_what_is_resident_grows_with_what_is_touched():
    before = resident()
    if before is None:
        pytest.skip("this system doesn't say")
    # new ones; a bytearray may take what this process has freed and still holds
    with mmap.mmap(-1, 64 << 20) as pages:
        pages.write(b"x" * len(pages))
        assert resident() >= before + 60_000_000 and peak_resident() >= before + 60_000_000


def test_scratch_of_sums_over_nodes_is_counted():
    given = "model.preset=smollm2-135m", "parallel.dp=4", "parallel.zero=1"
    nodes = "comm.node_ranks=2"
    choices = (), (nodes, "comm.levels=one"), (nodes,)
    within, one, two = (predict(planned(*given, *more, ranks=4))[0] for more in choices)
    assert two.messages > 2 * 4 * 576 * 1536 < one.messages and within.messages < 2**23


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_scratch_of_sums_over_nodes_does_not_grow_with_the_model(zero):
    """A round after the other is sorted by nodes, whatever a bucket's length is."""
    given = "parallel.dp=8", "comm.node_ranks=4", f"parallel.zero={zero}", BF16
    small, large = (
        predict(planned(*given, f"model.preset={name}", "batch.global=8", ranks=8))[0]
        for name in ("smollm2-135m", "llama3-8b")
    )
    assert large.weights > 20 * small.weights and large.messages < 2**28
    assert large.messages <= 2 * small.messages

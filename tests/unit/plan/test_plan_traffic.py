"""What a step is predicted to send over tp and ep is what the layers declare, to the byte.

That items send what is declared: test_model_traffic.py.
"""

import pytest

from mpitrain.comm.base.wire import sent_bytes
from mpitrain.commands.inspect import planned
from mpitrain.plan.declared.family import FAMILIES, presets
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.step_model import step_model, works_of

SIZES = (
    "model.layers=2",
    "model.width=64",
    "model.heads=4",
    "model.kv_heads=4",
    "model.ffn=128",
    "batch.global=4",
)
ITEM = 4  # bytes of an activation in fp32


CALLED = {"ep": "experts"}  # what a run calls an axis


def buffers(overrides, ranks, axis):
    """Return the bytes of buffers by operation, as declared and as predicted, of a step."""
    plan = planned(None, (*SIZES, "batch.global=4", *overrides), ranks)
    declared: dict[str, int] = {}
    placed = [each for stage in plan.stages for block in stage.blocks for each in block]
    for item in (item for each in placed for item in each.layer.traffic(plan.sizes)):
        for operation, found, num_bytes in (*item.forward, *item.backward):
            if found == CALLED.get(axis, axis):
                declared[operation] = declared.get(operation, 0) + plan.num_microbatches * num_bytes
    model = step_model(plan)
    layout = layout_of(plan.config, machine_of(find_machine("laptop")))
    works = works_of(model, layout, 1.0)
    parts = [work for kind in model.blocks for work in works.kinds[kind]]
    parts += [works.first, works.last]
    predicted: dict[str, int] = {}
    for part in parts:
        for each in (*part.forward, *part.backward):
            if each.axis == axis:
                num_bytes = layout.num_microbatches * each.num_bytes
                predicted[each.operation] = predicted.get(each.operation, 0) + num_bytes
    return declared, predicted


@pytest.mark.parametrize("more", [(), ("batch.micro=2",), ("model.tied=false",)], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_messages_are_the_items(ranks, more):
    declared, predicted = buffers((f"parallel.tp={ranks}", *more), ranks, "tp")
    assert declared["reduce_scatter"] == predicted["reduce_scatter"] > 0
    # besides, the loss gathers each position's maximum and sum, in fp32
    least = predicted["all_gather"]
    assert least < declared["all_gather"] <= least + 4 * 128 * ranks * 4 * 4


EXPERTS = ("model.family=mixtral", "experts.count=4", "experts.active=2", "experts.dispatch=flat")


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 1), (4, 2)])
def test_experts_messages_are_the_items(ranks, tp):
    """Declared is what leaves a rank, (n-1)/n of a buffer; half of the exchanges have 4 bytes a row more."""
    ep = ranks // tp
    declared, predicted = buffers((f"parallel.ep={ep}", f"parallel.tp={tp}", *EXPERTS), ranks, "ep")
    leaving = predicted["all_to_all"] * (ep - 1) // ep
    rows = leaving // (64 * ITEM)
    assert declared["all_to_all_v"] == leaving + rows // 2 * 4 > 0


def test_a_rank_sends_what_the_wires_formula_says():
    assert sent_bytes("all_gather", 1 << 20, 4) == (1 << 20) * 3 // 4


@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("family", sorted({preset["family"] for preset in presets().values()}))
def test_a_layer_of_any_family_sends_what_it_is_predicted_to(family, axis):
    """But for a maximum and a sum of each position that the loss gathers, and OLMo's norms of all heads."""
    heads = 2 if FAMILIES.find(family).grouped else 4
    keys = (f"model.family={family}", f"model.kv_heads={heads}", f"parallel.{axis}=2")
    declared, predicted = buffers(keys, 2, axis)
    assert declared.keys() - {"all_reduce"} == predicted.keys() and predicted
    for operation, num_bytes in predicted.items():
        assert num_bytes <= declared[operation] <= num_bytes + 4 * 128 * 2 * 4 * 4, operation

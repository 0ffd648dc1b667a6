"""FLOPs that memory.recompute adds, which HFU counts and MFU doesn't: by hand, and as torch counts them."""

import json

import pytest
from conftest import but_for
from launch import MPITRAIN, mpirun

from mpitrain import config as settings
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.step import recomputed_flops
from mpitrain.plan.predict.step_time.step_model import step_model
from mpitrain.plan.settings.resolve import resolve

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, SEQUENCE, BATCH = 4, 32, 4, 2, 48, 16, 4
SMALL = (
    f"model.layers={LAYERS}", f"model.width={WIDTH}", f"model.heads={HEADS}", f"model.kv_heads={KV_HEADS}",
    f"model.ffn={FFN}", f"data.sequence={SEQUENCE}", f"batch.global={BATCH}",
)  # fmt: skip
MODES = ("none", "selective", "full", "every-k")
SEEN = SEQUENCE / 2  # positions that a position sees: half of the scores are masked
WEIGHTS = 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH * KV_HEADS // HEADS + 3 * WIDTH * FFN  # of a block


def planned(*given, ranks=1):
    return plan_of(resolve(settings.load(None, (*SMALL, *given)), ranks, 256))


@pytest.mark.parametrize("mode", MODES)
def test_a_forward_of_what_runs_again_is_added(mode):
    """Of a token: 2 for each weight of a block, 4 D for each position that it sees."""
    attention = 4 * WIDTH * SEEN
    by_hand = {
        "none": 0.0,
        "selective": LAYERS * attention,
        "full": LAYERS * (2 * WEIGHTS + attention),
        "every-k": LAYERS * (2 * WEIGHTS + attention),
    }
    assert planned(f"memory.recompute={mode}").recomputed_flops_per_token() == pytest.approx(by_hand[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("given", ["", "parallel.cp=2", "parallel.tp=2 parallel.async_tp=true"])
def test_the_planner_counts_the_same(mode, given):
    plan = planned(f"memory.recompute={mode}", *given.split(), ranks=2 if "parallel" in given else 1)
    rates = machine_of(find_machine("laptop"))
    found = recomputed_flops(step_model(plan), layout_of(plan.config, rates))
    expected = plan.recomputed_flops_per_token() * BATCH * SEQUENCE
    assert found == pytest.approx(expected, rel=0.01)  # it counts the vectors of norms with the weights


@pytest.mark.parametrize("given", ["parallel.cp=2", "parallel.tp=2 parallel.async_tp=true"])
def test_attention_that_stands_alone_is_kept_by_selective_recomputation(given):
    found = planned("memory.recompute=selective", *given.split(), ranks=2)
    assert found.recomputed_flops_per_token() == 0 < found.flops_per_token()


def test_a_forward_that_a_table_runs_again_is_added(tmp_path):
    """Of four microbatches, one on the first stage and two on the last, which has the head."""
    table = tmp_path / "again.txt"
    table.write_text(
        "rank 0: F0@0 F1@0 R0@0 B0@0 F2@0 B1@0 F3@0 B2@0 B3@0\n"
        "rank 1: F0@1 R0@1 B0@1 F1@1 B1@1 F2@1 R2@1 B2@1 F3@1 B3@1\n"
    )
    ffn, head = 6 * WIDTH * FFN, 2 * 256 * WIDTH
    attention = 2 * WEIGHTS - ffn + 4 * WIDTH * SEEN
    # the embedding's stage has half a block more
    first, last = 3 * attention + 2 * ffn, attention + 2 * ffn + head
    found = planned(f"pipeline.schedule={table}", ranks=2).recomputed_flops_per_token()
    assert found == pytest.approx((first + 2 * last) / 4)


@pytest.mark.mpi
@pytest.mark.sizes(1)
@pytest.mark.parametrize("mode", but_for(MODES[1:], ["full"]))
def test_torch_counts_as_many_in_a_step(world, mode):
    """The products that torch runs more than without recomputation. torch counts masked scores, too."""
    products, attention = _counted(world, mode)
    usual, usual_attention = _counted(world, "none")
    tokens = BATCH * SEQUENCE
    extra = products - usual + (attention - usual_attention) / 2
    assert extra == pytest.approx(planned(f"memory.recompute={mode}").recomputed_flops_per_token() * tokens)


def _counted(world, mode):
    """Return the FLOPs of a step's products of matrices, and of the forwards of attention."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh

    def of_attention(q, k, v, *_, out_shape=None, **__):
        batch, heads, length, width = q
        return 4 * batch * heads * length * length * width

    plan = planned(f"memory.recompute={mode}", *["memory.every=2"] * (mode == "every-k"))
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    rows = torch.randint(0, 256, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: of_attention}) as counter:
        actor.run_step(1, actor.cutter.cut(rows), 1e-3)
    mesh.free()
    counts = counter.get_flop_counts()["Global"]
    attention = counts.pop(kernel)
    return sum(counts.values()), attention


@pytest.mark.parametrize(("mode", "factor"), [("none", 1.0), ("full", None)])
def test_a_run_writes_both_of_each_step(tmp_path, mode, factor):
    keys = [f"memory.recompute={mode}", "run.steps=2", "run.eval_batches=1", f"run.dir={tmp_path / 'run'}"]
    given = [word for key in (*SMALL, *keys) for word in ("--set", key)]
    done = mpirun(1, MPITRAIN, "run", *given)
    assert done.returncode == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    head = 256 * WIDTH
    block = 6 * WEIGHTS + 12 * WIDTH * SEEN
    expected = factor or 1 + LAYERS * block / 3 / (LAYERS * block + 6 * head)
    assert [line["hfu"] / line["mfu"] for line in lines] == pytest.approx([expected] * 2)
    last = next(line for line in reversed(done.output.splitlines()) if " MFU " in line)
    assert f"HFU {lines[-1]['hfu']:.1%}  " in last

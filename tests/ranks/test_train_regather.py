"""parallel.regather: a backward gathers inputs again instead of keeping them; the bits are the same."""

import pytest
from conftest import LONG, agree
from training import one_step, same, train

pytestmark = pytest.mark.mpi(min_size=2)

TP = "parallel.tp=2"
CASES = {
    2: [
        (TP,),
        (TP, "memory.recompute=selective"),
        (TP, "precision.compute=bf16", "memory.offload=activations"),
        (TP, "precision.compute=fp8", "model.width=64", "model.kv_heads=2", "model.ffn=128"),
        (TP, "model.family=gpt2", "model.kv_heads=2"),
        (TP, "model.family=olmo2", "model.kv_heads=2", "batch.micro=2"),
        (TP, "model.family=gemma2", "run.compile=false"),
        (TP, "model.family=mixtral", "experts.count=4"),
    ],
    4: [
        (TP, "parallel.pp=2", "pipeline.schedule=1f1b", "memory.recompute=selective"),
        (TP, "parallel.pp=2", "pipeline.schedule=zb-h1"),
        (TP, "parallel.pp=2", "pipeline.schedule=zbv", "memory.recompute=selective"),
        (TP, "parallel.pp=2", "pipeline.schedule=seq1f1b"),
        (TP, "parallel.pp=2", "pipeline.schedule=dualpipe"),
        (TP, "parallel.cp=2", "parallel.context=zigzag"),
        (TP, "parallel.dp=2", "parallel.zero=3"),
    ],
}
LONGER = [  # another case has their keys, but for those of the last two
    (TP, "memory.recompute=selective"),
    (TP, "model.family=gpt2", "model.kv_heads=2"),
    (TP, "model.family=gemma2", "run.compile=false"),
    (TP, "parallel.pp=2", "pipeline.schedule=1f1b", "memory.recompute=selective"),
    (TP, "parallel.pp=2", "pipeline.schedule=zb-h1"),
    (TP, "parallel.pp=2", "pipeline.schedule=dualpipe"),
    (TP, "parallel.pp=2", "pipeline.schedule=seq1f1b"),
    (TP, "parallel.cp=2", "parallel.context=zigzag"),
    (TP, "model.family=mixtral", "experts.count=4"),
    (TP, "model.family=olmo2", "model.kv_heads=2", "batch.micro=2"),
    (TP, "parallel.dp=2", "parallel.zero=3"),
    (TP, "precision.compute=bf16", "memory.offload=activations"),
    (TP, "precision.compute=fp8", "model.width=64", "model.kv_heads=2", "model.ffn=128"),
]
EVERY_CASE = [
    pytest.param(size, settings, marks=[LONG] * (settings in LONGER))
    for size, cases in CASES.items()
    for settings in cases
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("size", "settings"), EVERY_CASE, ids=str)
def test_losses_norms_and_weights_have_the_same_bits(world, size, settings):
    from training import resolved

    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    kept, again = (
        train(world, resolved(world, *settings, f"parallel.regather={value}")) for value in ("false", "true")
    )
    agree(world, same(again, kept), f"{settings}")


LARGE = "model.layers=8", "model.width=64", "data.sequence=64", "batch.micro=2", "parallel.tp=2"


@pytest.mark.parametrize("mode", ["none", pytest.param("selective", marks=LONG)])
def test_what_a_block_held_of_gathered_inputs_is_gone(world, mode):
    """Two tensors [2, 64, 64] in fp32 for each of 8 blocks, as predicted and as counted."""
    if world.size != 2:
        pytest.skip("runs on 2 ranks")
    steps = [
        one_step(world, *LARGE, f"memory.recompute={mode}", f"parallel.regather={value}")
        for value in ("false", "true")
    ]
    predicted, held = ([step[at].activations for step in steps] for at in (0, 2))
    agree(world, predicted[0] - predicted[1] == 8 * 2 * 2 * 64 * 64 * 4, f"predicted {predicted}")
    agree(world, held == predicted, f"predicted {predicted}, held {held}")

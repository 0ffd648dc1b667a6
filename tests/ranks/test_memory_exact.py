"""Activations that are predicted to the byte.

Separate documents and split backwards, offloaded or not, on every rank of a layout.
"""

import pytest
from conftest import agree, but_for
from training import one_step

pytestmark = pytest.mark.mpi(min_size=2)

OFFLOADED = "memory.offload=activations data.documents=separate"
BY_BLOCK = "parallel.dp=2 parallel.pp=2 pipeline.schedule=zb-h1 parallel.zero=3 parallel.reduce=microbatch"
LAYOUTS = {
    2: [
        f"parallel.dp=2 {OFFLOADED}",
        f"parallel.dp=2 batch.micro=2 {OFFLOADED}",
        f"parallel.dp=2 {OFFLOADED} memory.recompute=full",
        f"parallel.tp=2 {OFFLOADED}",
        f"parallel.cp=2 {OFFLOADED}",
        f"parallel.cp=2 {OFFLOADED} memory.recompute=full",
        f"parallel.cp=2 parallel.context=gather {OFFLOADED}",
        f"parallel.pp=2 {OFFLOADED}",
        f"parallel.pp=2 pipeline.schedule=gpipe {OFFLOADED}",
        f"parallel.pp=2 pipeline.schedule=zbv {OFFLOADED}",
        f"parallel.pp=2 pipeline.schedule=seq1f1b {OFFLOADED}",
        f"parallel.pp=2 pipeline.schedule=dualpipe {OFFLOADED}",
        f"parallel.pp=2 pipeline.schedule=zb-h1 {OFFLOADED}",
        f"parallel.pp=2 pipeline.schedule=zb-h1 {OFFLOADED} precision.compute=bf16",
        "parallel.pp=2 pipeline.schedule=zb-h1 memory.offload=activations model.family=qwen3",
        "parallel.tp=2 memory.offload=activations model.family=olmo2",  # keeps tuples within a tuple
        "parallel.pp=2 pipeline.schedule=zb-h1 data.documents=separate",
        "parallel.pp=2 pipeline.schedule=zb-h1 memory.recompute=full",
    ],
    4: [
        f"{BY_BLOCK} pipeline.stages=[4.5,3.5]",
        f"{BY_BLOCK} pipeline.stages=[3.5,4.5] {OFFLOADED}",
        f"parallel.pp=2 parallel.tp=2 pipeline.schedule=zb-h1 {OFFLOADED}",
    ],
}
MODEL = ("model.layers=8", "model.width=64", "model.vocab=256", "data.sequence=64", "batch.global=8")
LONGER = [
    (2, f"parallel.dp=2 batch.micro=2 {OFFLOADED}"),
    (2, f"parallel.cp=2 parallel.context=gather {OFFLOADED}"),
    (2, f"parallel.pp=2 pipeline.schedule=gpipe {OFFLOADED}"),
    (2, "parallel.pp=2 pipeline.schedule=zb-h1 memory.offload=activations model.family=qwen3"),
    (4, f"{BY_BLOCK} pipeline.stages=[4.5,3.5]"),
]


@pytest.mark.few_cases(5)
@pytest.mark.parametrize(
    ("size", "settings"),
    but_for([(size, settings) for size in LAYOUTS for settings in LAYOUTS[size]], LONGER),
)
def test_activations_are_predicted_to_the_byte(world, size, settings):
    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    predicted, _, held = one_step(world, *MODEL, *settings.split())
    agree(
        world,
        predicted.activations == held.activations,
        f"{settings}: predicted {predicted.activations}, held {held.activations}",
    )

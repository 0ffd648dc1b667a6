"""What `mpitrain memory` predicts is what a rank allocates."""

import pytest
from conftest import agree
from test_train_zero import resolved, train

pytestmark = pytest.mark.mpi(min_size=2)

CHOICES = [
    ("parallel.zero=0",),
    ("parallel.zero=1", "precision.compute=bf16"),
    ("parallel.zero=2", "optimizer.name=muon"),
    ("parallel.zero=3", "precision.compute=bf16"),
    ("parallel.zero=3", "model.tied=false", "optimizer.name=sgd"),
    ("parallel.zero=2", "numerics.reproducible=layout"),
    ("parallel.zero=0", "numerics.reproducible=layout"),
]
LAYOUTS = {
    2: [("parallel.dp=2",), ("parallel.dp=1", "parallel.pp=2", "pipeline.schedule=zbv"), ("parallel.tp=2",), ("parallel.cp=2",)],
    4: [("parallel.dp=4", "parallel.dp_shard=2"), ("parallel.dp=2", "parallel.pp=2", "pipeline.schedule=1f1b")],
}


@pytest.mark.parametrize("choice", CHOICES, ids=",".join)
@pytest.mark.parametrize("layout", [layout for found in LAYOUTS.values() for layout in found], ids=",".join)
def test_the_state_that_was_predicted_is_allocated(world, layout, choice):
    """To the byte, but for the optimiser: a rank's shard can hold more of the padding than the first one's."""
    from mpitrain.memory_report import measure, predict

    if choice[0] == "parallel.zero=0":
        layout = tuple(s for s in layout if "dp_shard" not in s)
    config, found = resolved(world, *layout, *choice), []

    def look(actor):
        found.append((predict(config)[actor.pp.rank], measure(actor), actor.sharding.rank))

    train(world, config, look)
    predicted, measured, rank = found[0]
    same = predicted[:2] + predicted[3:4] == measured[:2] + measured[3:4]
    agree(world, same and (rank or predicted.moments == measured.moments), f"predicted {predicted}, found {measured}")
    agree(world, measured.moments <= predicted.weights * 4, f"{measured}")

"""Pairs that are walked part by part train to the same bits as computations that stand alone, and
hold what was predicted.
"""

import itertools

import pytest
from conftest import EVERY, agree, but_for
from test_train_memory import one_step
from test_train_zero import resolved, train
from training import of_tensors

pytestmark = pytest.mark.mpi(min_size=2)

SCHEDULES = (("pipeline.schedule=dualpipe", "pipeline.stages=[3, 1]"), ("pipeline.schedule=dualpipev",))
CHOICES = (
    ("parallel.zero=3",),
    ("parallel.zero=2", "parallel.reduce=microbatch"),
    ("parallel.zero=3", "parallel.reduce=microbatch", "parallel.ahead=2"),
    ("parallel.zero=3", "parallel.gather=step", "model.tied=false"),
)
MODELS = {
    2: ((), ("model.family=mixtral", "experts.count=4", "experts.buffer=0.5")),
    4: ((), ("model.family=mixtral", "experts.count=4", "parallel.ep=2"), ("parallel.cp=2",)),
}


def walks(size, choice):
    """Whether anything is walked in parts: on 2 ranks, both of a pipeline, ZeRO divides nothing."""
    return size > 2 or "parallel.reduce=microbatch" in choice


CASES = [
    (size, schedule, choice, model)
    for size, models in MODELS.items()
    for (a, schedule), (b, choice), (c, model) in itertools.product(
        *map(enumerate, (SCHEDULES, CHOICES, models))
    )
    if (EVERY or (a + b + c) % len(models) == 0) and walks(size, choice)
]
LONGER = [(4, SCHEDULES[0], CHOICES[2], MODELS[4][1]), (4, SCHEDULES[0], CHOICES[1], MODELS[4][2])]


def layout_of(world, size, model, *settings):
    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    dp = 1 if size == 2 or "parallel.cp=2" in model else 2
    return ("parallel.pp=2", f"parallel.dp={dp}", *model, *settings)


def named(each):
    return ",".join(word.split(".", 1)[-1] for word in each) if isinstance(each, tuple) else str(each)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("size", "schedule", "choice", "model"), but_for(CASES, LONGER), ids=named)
def test_part_with_part_the_bits_are_those_of_each_alone(world, size, schedule, choice, model):
    layout = layout_of(world, size, model, *schedule, *choice)
    together = []

    def look(actor):
        following = zip(actor.training, actor.training[1:])
        together.append(sum(action.part is not None for before, action in following if before.kind == "PAIR"))

    alone = train(world, resolved(world, *layout), look)
    found = train(world, resolved(world, *layout, "pipeline.pairs=parts"), look)
    agree(world, found[0] == alone[0], f"{found[0]} instead of {alone[0]}")
    different = [name for name in alone[1] if not (alone[1][name] == found[1][name]).all()]
    agree(world, found[1].keys() == alone[1].keys() and not different, f"{different[:3]} differ")
    agree(world, together[0] == 0 < together[1], f"pairs of parts: {together}")


LARGE = ("model.layers=8", "model.width=64", "model.vocab=256", "data.sequence=64")
MEMORY = (("pipeline.schedule=dualpipe", "pipeline.stages=[5, 3]"), SCHEDULES[1])
KEPT = (
    (),
    ("memory.recompute=full",),
    ("memory.recompute=selective",),
    ("memory.offload=activations",),
    ("precision.compute=bf16",),
)
HELD = [
    (size, *each)
    for size in MODELS
    for number, each in enumerate(itertools.product(MEMORY, CHOICES, KEPT))
    if (EVERY or number % (6 if size == 2 else 13) == size // 2) and walks(size, each[1])
]
HELD_LONGER = [(4, MEMORY[0], CHOICES[0], KEPT[2]), (4, MEMORY[1], CHOICES[1], KEPT[3])]


@pytest.mark.few_cases(3)
@pytest.mark.sizes(2)
@pytest.mark.parametrize(("size", "schedule", "choice", "kept"), but_for(HELD, HELD_LONGER), ids=named)
def test_what_was_predicted_is_held(world, size, schedule, choice, kept):
    """Weights, gradients and buffers to the byte, activations within 5%, in host memory within 2%."""
    layout = layout_of(world, size, (), *LARGE, *schedule, *choice, *kept, "pipeline.pairs=parts")
    predicted, _, held = one_step(world, *layout)
    found = of_tensors(predicted, held)._replace(activations=held.activations, host=held.host)
    agree(world, found == held, f"predicted {predicted}, held {held}")
    agree(
        world,
        abs(predicted.activations - held.activations) < 0.05 * held.activations,
        f"predicted {predicted}, held {held}",
    )
    agree(world, abs(predicted.host - held.host) <= 0.02 * held.host, f"predicted {predicted}, held {held}")

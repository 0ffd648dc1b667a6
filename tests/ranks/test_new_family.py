"""A family in a file of its own (tests/support/new_family.py), and nothing else: an activation, norms after
sublayers and soft-capped scores that the code has never seen.

It trains like plain torch in each layout, holds what its layers predict and sends what they declare.
"""

import pytest
from conftest import EVERY, agree, but_for
from pairwise_cases import pairwise_cases
from test_model_new_layer import differences

VOCAB = 64
LENGTH = 16
SETTINGS = (
    "model.family=new_family:CAPPED", "model.preset=capped-tiny", f"model.vocab={VOCAB}",
    f"data.sequence={LENGTH}", "batch.global=8", "precision.compute=fp64", "optimizer.name=sgd",
    "optimizer.momentum=0", "optimizer.decay=0", "optimizer.clip=0", "comm.bucket_mb=0.002",
    "comm.timeout_s=200",
)  # fmt: skip
LAYOUTS = {
    1: ("", "memory.recompute=selective", "memory.recompute=full", "pipeline.schedule=seq1f1b"),
    2: (
        "tp=2", "tp=2 sequence=false", "tp=2 async_tp=true", "tp=2 memory.recompute=selective", "pp=2",
        "pp=2 pipeline.schedule=zbv", "dp=2 zero=3", "dp=2 data.documents=separate", "cp=2 context=ring",
        "cp=2 context=zigzag", "cp=2 context=gather", "cp=2 context=ulysses",
        "cp=2 context=zigzag data.documents=separate", "cp=2 context=ulysses data.documents=separate",
        "dp=2 memory.offload=activations",
    ),
    4: ("tp=2 pp=2", "tp=2 dp=2 zero=2", "cp=2 tp=2 context=gather", "cp=4 context=zigzag"),
}  # fmt: skip
CASES = [(size, layout, window) for size, found in LAYOUTS.items() for layout in found for window in (0, 5)]


def features(case):
    """Return what meets in a case."""
    _, layout, window = case
    return *layout.split(), *["plain"] * (not layout), f"window={window}"


LONGER = [
    (2, "tp=2 async_tp=true", 0), (2, "tp=2 sequence=false", 0), (2, "cp=2 context=ring", 0),
    (2, "cp=2 context=ulysses", 0), (2, "cp=2 context=gather", 0), (4, "tp=2 dp=2 zero=2", 0),
    (4, "tp=2 dp=2 zero=2", 5), (4, "cp=4 context=zigzag", 0), (4, "cp=4 context=zigzag", 5),
    (4, "cp=2 tp=2 context=gather", 5), (2, "dp=2 zero=3", 0), (1, "memory.recompute=full", 0),
    (1, "memory.recompute=selective", 0), (1, "pipeline.schedule=seq1f1b", 0),
]  # fmt: skip
CASES = CASES if EVERY else but_for(pairwise_cases(CASES, features, lambda case: case[0]), LONGER)


def plan_with(world_size, layout, window):
    from mpitrain import config as settings
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    keys = [word if "." in word else f"parallel.{word}" for word in layout.split()]
    given = (*SETTINGS, f"attention.window={window}", *keys)
    return plan_of(resolve(settings.load(None, given), world_size, VOCAB))


def plain(weights, rows, window, blocks=4):
    """Return the mean loss of rows of tokens, by plain torch."""
    import new_family
    import torch
    from oracle_families import heads, rms, rotate
    from torch.nn import functional

    eps, cap = new_family.EPS, new_family.SOFT_CAP
    has = dict(theta=10_000.0, yarn_factor=1.0, head_width=4)
    x = weights["embedding.weight"][rows[:, :-1]]
    length = x.shape[1]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    for i in range(blocks):
        p = {n.removeprefix(f"blocks.{i}."): w for n, w in weights.items() if n.startswith(f"blocks.{i}.")}
        h = rms(x, p["attention.norm.weight"], eps)
        q, k, v = (heads(h @ p[f"attention.{n}.weight"].T, 4) for n in "qkv")
        k, v = (y.repeat_interleave(2, 1) for y in (rotate(k, has), v))
        scores = cap * torch.tanh(rotate(q, has) @ k.mT / 2 / cap)
        seen = (distance >= 0) & (distance < (window if window and i % 2 == 0 else length))
        a = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        y = a.transpose(1, 2).flatten(-2) @ p["attention.output.weight"].T
        x = x + rms(y, p["attention.post_norm.weight"], eps)
        h = rms(x, p["ffn.norm.weight"], eps)
        y = ((h @ p["ffn.gate.weight"].T).relu() ** 2 * (h @ p["ffn.up.weight"].T)) @ p["ffn.down.weight"].T
        x = x + rms(y, p["ffn.post_norm.weight"], eps)
    logits = rms(x, weights["head.norm.weight"], eps) @ weights["embedding.weight"].T
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@pytest.mark.few_cases(4)
@pytest.mark.sizes(1, 2)
@pytest.mark.mpi
@pytest.mark.parametrize(("size", "layout", "window"), CASES)
def test_it_trains_like_plain_torch_holds_and_sends_what_it_declares(world, size, layout, window):
    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    plan = plan_with(size, layout, window)
    whole = plan_with(1, "", window).parameters()
    wrong = differences(world, plan, whole, lambda weights, rows: plain(weights, rows, window))
    agree(world, not wrong, f"{wrong[:3]}")

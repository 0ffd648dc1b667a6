"""Packed documents, some of their tokens without loss, train in every layout as a loop over documents
one by one does: loss, every gradient, the weights after a step.
"""

import numpy as np
import pytest
from conftest import EVERY, agree, but_for
from test_model_new_layer import initial
from test_train_decoders import VOCAB, meaning, plan_with
from training import alone, once, part, resolved, train

pytestmark = pytest.mark.mpi
LAYOUTS = {
    1: ("", "pipeline.schedule=seq1f1b", "memory.recompute=selective"),
    2: (
        *("tp=2", "tp=2 async_tp=true", "cp=2 context=zigzag", "cp=2 context=ring", "cp=2 context=gather"),
        *("cp=2 context=ulysses", "pp=2", "pp=2 pipeline.schedule=zbv", "dp=2 zero=3"),
    ),
    4: ("cp=2 tp=2", "cp=2 pp=2"),
}
CASES = [
    (family, size, layout)
    for family in ("llama", "gpt2")
    for size, layouts in LAYOUTS.items()
    for layout in layouts
    if family != "gpt2" or size < 4
]
CASES += [("glm-4.5", 2, "ep=2"), ("glm-4.5", 2, "ep=2 cp=2")]
CASES += [("llama", 1, "model.mtp=2"), ("llama", 2, "model.mtp=2 cp=2"), ("llama", 2, "model.mtp=1 pp=2")]
if not EVERY:
    few = ("llama tp=2", "llama pp=2", "gpt2 pp=2", "gpt2 cp=2 context=zigzag", "gpt2 tp=2", "glm-4.5 ep=2")
    kinds = [f"llama cp=2 context={kind}" for kind in ("zigzag", "ring", "gather", "ulysses")]
    chosen = (*few, *kinds, "llama ", "llama model.mtp=2", "llama model.mtp=2 cp=2")
    CASES = but_for(CASES, [case for case in CASES if f"{case[0]} {case[2]}" not in chosen])


def packed_text(sequence):
    """Return a text of short and long documents, a few tokens of which carry no loss, and its parts."""
    from mpitrain.data.token_rows import Text

    dice = np.random.default_rng(3)
    lengths = np.minimum(dice.lognormal(1.6, 0.8, 40).astype(int) + 1, 3 * sequence)
    ends = np.cumsum(lengths)
    tokens = dice.integers(0, VOCAB, ends[-1])
    bare = np.sort(dice.choice(len(tokens), 30, replace=False)).reshape(-1, 2)  # begin and end of runs
    scored = np.ones(len(tokens), bool)
    for begin, end in bare:
        scored[begin:end] = False
    return Text(tokens, None, ends, bare), tokens, scored


def plain_step(plan, whole):
    """Return loss, gradients and weights of a step of the loop over documents."""
    import torch
    from oracle_decoders import further_loss, loss_of_documents

    from mpitrain.data.packed_rows import PackedSampler

    text, tokens, scored = packed_text(plan.config.data.sequence)
    sampler = PackedSampler(text, plan.config.data.sequence, 1)
    documents = [
        (tokens[begin:end].tolist(), scored[begin:end].tolist())
        for slot in range(plan.config.batch.global_)
        for begin, end in sampler.pieces(slot)
    ]
    weights = {spec.name: initial(spec) for spec in whole}
    has, model = meaning(plan.config), plan.config.model
    loss = loss_of_documents(weights, documents, has)
    count = sum(sum(counts[1:]) for _, counts in documents)
    if model.mtp:
        (loss + model.mtp_weight * further_loss(weights, documents, has, model.mtp) / count).backward()
    else:
        loss.backward()
    grads = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in weights.items()
    }
    return loss.item(), count, grads


@pytest.mark.few_cases(12)
@pytest.mark.parametrize(("family", "size", "layout"), CASES)
def test_packed_rows_train_like_documents_one_by_one(world, monkeypatch, family, size, layout):
    import torch

    from mpitrain.kernels import document_spans
    from mpitrain.plan.division import sequence

    # rows are short: some documents alone and divided over ranks, others together
    monkeypatch.setattr(document_spans, "LEAST", 5)
    monkeypatch.setattr(sequence, "LEAST_SHARE", 2)

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.data.packed_rows import PackedSampler
    from mpitrain.training.step_rows import StepRows

    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    plan = plan_with(family, size, f"{layout} data.documents=packed optimizer.clip=0")
    mtp = plan.config.model.mtp
    alone = plan_with(family, 1, f"data.documents=packed model.mtp={mtp}")
    expected = once(world, ("packed", family, mtp), lambda: plain_step(alone, alone.parameters()))
    loss, count, grads = expected
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    sampler = PackedSampler(packed_text(plan.config.data.sequence)[0], plan.config.data.sequence, 1)
    rows = StepRows(actor, True, mesh["dp"].rank)
    result = actor.run_step(1, rows.microbatches(sampler, 0), 0.1)
    wrong = [f"loss {result.loss}, not {loss}"] * (not abs(result.loss - loss) < 1e-10)
    wrong += [f"{result.num_tokens} targets, not {count}"] * (result.num_tokens != count)
    # that of a key's bias is zero but for rounding, without rotary embeddings
    least = 1e-4 * max(grad.abs().max() for grad in grads.values())
    for piece in (piece for piece in actor.gradients.pieces if piece.spec.trained):
        own = part(grads, piece)
        error = (piece.grad - own).abs().max() / max(grads[piece.spec.name].abs().max(), least)
        wrong += [f"gradient of {piece.spec.name}: {error:.1e}"] * (not error < 1e-10)
    mesh.free()
    agree(world, not wrong, f"{mesh}: {wrong[:3]}")


@pytest.mark.parametrize("kind", ["zigzag", "gather"])
@pytest.mark.parametrize(
    "settings",
    [
        "model.family=gpt2 model.kv_heads=2 model.attention_dropout=0.3 model.residual_dropout=0.1",
        "model.family=gpt-oss attention.window=3 experts.count=4 experts.active=2",
        "model.family=deepseek-v3 model.kv_heads=2 model.mtp=1",
    ],
)
def test_documents_that_ranks_share_train_as_on_one_rank(world, monkeypatch, settings, kind):
    """Windows, dropout and positions are those of the row, whatever order ranks have it in."""
    from mpitrain.kernels import document_spans
    from mpitrain.plan.division import sequence

    monkeypatch.setattr(document_spans, "LEAST", 5)
    monkeypatch.setattr(sequence, "LEAST_SHARE", 1)
    if world.size != 2:
        pytest.skip("2 ranks tell")
    keys = (*settings.split(), "precision.compute=fp64", "data.documents=separate", "data.sequence=16")
    expected, weights = alone(world, *keys)
    lines, found = train(world, resolved(world, *keys, "parallel.cp=2", f"parallel.context={kind}"))
    wrong = [f"{line}, not {other}" for line, other in zip(lines, expected) if not close(line, other)]
    wrong += [name for name, weight in weights.items() if not close(found[name], weight)]
    agree(world, not wrong, f"{wrong[:3]}")


def close(one, other):
    return np.allclose(one, other, rtol=1e-10, atol=1e-10)

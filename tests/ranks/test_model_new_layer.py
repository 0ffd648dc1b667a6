"""A layer kind and a family that the code has never seen: one class, and one object that is the family.

Parity with plain torch, memory, traffic, FLOPs and what it tells besides its output follow from
what the layer declares.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from conftest import agree, but_for
from training import of_tensors

from mpitrain.plan.declared.family import ROTARY, ModelFamily
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.declared.parameters import (
    COLUMNS,
    EPS,
    ROWS,
    Spec,
    matrix,
    norm,
    product_flops,
    residual_std,
)

pytestmark = pytest.mark.few_ranks

WIDTH = 16
UNITS = 24
VOCAB = 64
LAYERS = 3
STEPS = 2
SETTINGS = (
    f"model.layers={LAYERS}", f"model.width={WIDTH}", f"model.ffn={UNITS}", f"model.vocab={VOCAB}",
    "model.heads=4", "model.kv_heads=2",
    "model.family=test_model_new_layer:BIASED", "data.sequence=8", "batch.global=8", "precision.compute=fp64",
    "optimizer.name=sgd", "optimizer.momentum=0",
    "optimizer.decay=0", "optimizer.clip=0", "comm.bucket_mb=0.002", "comm.timeout_s=200",
)  # fmt: skip
LAYOUTS = {
    1: ("",),
    2: ("tp=2", "tp=2 sequence=false", "tp=2 regather=true", "pp=2", "dp=2 zero=3", "cp=2"),
    4: ("tp=4", "tp=2 pp=2", "tp=2 dp=2 zero=2"),
}
LONGER = ["tp=2 sequence=false", "tp=2 regather=true", "tp=4"]


# ---------------------------------------------------------------- the one file


@dataclass(frozen=True)
class BiasedUnit:
    """down(sigmoid(gate(norm(x)) + bias) * up(norm(x))): a gated linear unit whose gate has a bias.

    It tells how open its gates are.
    """

    width: int
    units: int
    depth: int
    metrics: ClassVar[tuple[str, ...]] = ("gates",)

    def parameters(self):
        return (
            *norm("unit.norm", self.width, EPS),
            matrix("unit.gate.weight", self.units, self.width, ROWS),
            Spec("unit.gate.bias", (self.units,), constant=0.0, divided=ROWS),
            matrix("unit.up.weight", self.units, self.width, ROWS),
            matrix("unit.down.weight", self.width, self.units, COLUMNS, std=residual_std(self.depth)),
        )

    def flops(self, sequence):
        return product_flops(self.parameters())

    def kept(self, sizes, segment):
        return (
            sizes.normed(self.width, sizes.factor)
            + sizes.positions * (2 * sizes.itemsize + sizes.factor) * self.units // sizes.tp
        )

    def left(self, sizes):
        return (2 * self.width + 3 * self.units // sizes.tp) * sizes.factor * sizes.positions

    def working(self, sizes):
        from mpitrain.plan.declared.layer import Working

        return Working(
            3 * sizes.stream(self.width), 3 * sizes.positions * self.units // sizes.tp * sizes.itemsize
        )

    def history(self, sizes):
        return 0

    def traffic(self, sizes):
        from mpitrain.plan.declared.layer_traffic import residual

        return residual(sizes, self.width)

    def items(self, own, site):
        import torch

        from mpitrain.model.segment import Segment

        class AddBias(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, parameter, small):
                ctx.parameter = parameter
                ctx.small = small
                return x + parameter.data

            @staticmethod
            def backward(ctx, grad):
                ctx.small.append((ctx.parameter, grad.flatten(0, -2).sum(0)))
                return grad, None, None

        class Unit(Segment):
            def compute(self, x_BTD, context, tape):
                norm, gate, bias, up, down = own.values()
                h_BTD, again = tape.normed(x_BTD, None if site.tp else norm)
                gate_BTF, up_BTF = tape.linears(h_BTD, (gate, up), again)
                open_BTF = torch.sigmoid(AddBias.apply(gate_BTF, bias, tape.small))
                context.record_metric("gates", open_BTF.mean())
                return tape.linears(open_BTF * up_BTF, (down,))[0]

        return site.residual(Unit(), own["unit.norm.weight"])


def biased(config):
    from mpitrain.model.layers.embedding_and_head import Embedding, Head

    model = config.model
    ends = (end(model.vocab, model.width, model.tied) for end in (Embedding, Head))
    return ModelLayers(
        next(ends), model.layers * ((BiasedUnit(model.width, model.ffn, model.layers),),), next(ends)
    )


BIASED = ModelFamily("biased", biased, attention=ROTARY)


# ---------------------------------------------------------------- what follows from it


def plan_with(world_size, layout, *more):
    from mpitrain import config as settings
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    keys = (f"parallel.{word}" for word in layout.split())
    return plan_of(resolve(settings.load(None, (*SETTINGS, *keys, *more)), world_size, VOCAB))


def plain(weights, rows):
    """Return the mean loss of rows of tokens, by plain torch."""
    from torch.nn import functional

    def norm(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    x = weights["embedding.weight"][rows[:, :-1]]
    for i in range(LAYERS):
        names = ("norm.weight", "gate.weight", "gate.bias", "up.weight", "down.weight")
        n, g, b, u, d = (weights[f"blocks.{i}.unit.{name}"] for name in names)
        h = norm(x, n)
        x = x + (((h @ g.T + b).sigmoid() * (h @ u.T)) @ d.T)
    logits = norm(x, weights["head.norm.weight"]) @ weights["embedding.weight"].T
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@pytest.mark.few_cases(4)
@pytest.mark.mpi
@pytest.mark.parametrize(
    "layout", but_for([layout for found in LAYOUTS.values() for layout in found], LONGER)
)
def test_a_new_layer_trains_like_plain_torch_holds_and_sends_what_it_declares(world, layout):
    if layout not in LAYOUTS.get(world.size, ()):
        pytest.skip("runs on other ranks")
    plan = plan_with(world.size, layout)
    whole = plan_with(1, "", "parallel.dp=1").parameters()

    def half_open(result):  # at first
        parallel = plan.config.parallel
        gates = result.metrics["gates"] / (LAYERS * plan.num_microbatches * parallel.dp * parallel.cp)
        return [f"gates {gates}"] if abs(gates - 0.5) > 0.05 else []

    wrong = differences(world, plan, whole, plain, look=half_open)
    agree(world, not wrong, f"{wrong[:3]}")


def differences(world, plan, whole, plain, look=lambda result: [], routed=False):
    """Return in words what is otherwise than in plain torch, and than is predicted, over some steps of SGD.

    whole: the parameters of the model.
    plain: makes the mean loss of {name: weight} and rows of tokens.
    look: says what is wrong with the result of a step.
    routed: rows go to experts as they are routed: what is held and sent isn't compared.
    """
    import torch
    from training import part, recorded

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.actor.memory import measure
    from mpitrain.actor.memory_meter import Watch
    from mpitrain.actor.rehearsal import Rehearsal
    from mpitrain.plan.predict.memory import predict

    wrong = []
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    weights = {spec.name: initial(spec) for spec in whole}
    watch = Watch(actor.stages.values(), actor.site.constants())
    parallel, data = plan.config.parallel, plan.config.data
    separate = data.documents == "separate"
    for step in range(1, STEPS + 1):
        dice = torch.Generator().manual_seed(step)
        rows = torch.randint(1, VOCAB, (8, data.sequence + 1), generator=dice)
        if separate:
            rows[:, 6] = 0  # two documents, each by itself
        own = rows.chunk(parallel.dp)[mesh["data"].rank // parallel.cp]
        mine = actor.cutter.cut(own, 0 if separate else None)
        results = []
        found, _ = recorded(
            mesh, lambda s=step, m=mine, r=results: r.append(actor.run_step(s, m, 0.1, watch=watch))
        )
        for weight in weights.values():
            weight.grad = None
        loss = loss_of_documents(weights, rows, plain, separate)
        loss.backward()
        off = abs(results[0].loss - loss.item())
        wrong += [f"loss {results[0].loss}, not {loss.item()}"] if not off < 1e-10 else []
        largest = max(weight.grad.abs().max() for weight in weights.values() if weight.grad is not None)
        for piece in (piece for piece in actor.gradients.pieces if piece.spec.trained):
            expected = part({name: weight.grad for name, weight in weights.items()}, piece)
            size = expected.abs().max()
            # a gradient that is nothing but rounding, as that of a bias of keys without positions
            error = (piece.grad - expected).abs().max() / (size if size > 1e-12 * largest else largest)
            wrong += [f"gradient of {piece.spec.name}: {error:.1e}"] if not error < 1e-10 else []
        wrong += look(results[0])
        with torch.no_grad():
            for weight in weights.values():
                weight -= 0.0 if weight.grad is None else 0.1 * weight.grad
        declared = Rehearsal(plan, world.rank).training()
        wrong += [f"sent {found}, declared {declared}"] if found != declared and not routed else []
    predicted = predict(plan, actor.shards_here)[actor.pp.rank]
    held = measure(actor, watch)
    wrong += (
        [f"holds {held}, predicted {predicted}"] if of_tensors(predicted, held) != held and not routed else []
    )
    mesh.free()
    return wrong


def loss_of_documents(weights, rows, plain, separate):
    """Return the mean loss of rows, or of their two documents, the first of which ends after 6 tokens."""
    parts = [rows[:, :7], rows[:, 7:]] if separate else [rows]
    counts = [each[:, 1:].numel() for each in parts]
    return sum(count * plain(weights, each) for count, each in zip(counts, parts)) / sum(counts)


def initial(spec):
    import torch

    from mpitrain.parallel.zero.initial import normal

    flat = (
        normal(1, spec.name, 0, spec.numel, spec.std)
        if spec.std
        else torch.full((spec.numel,), spec.constant, dtype=torch.float64)
    )
    return flat.view(spec.shape).requires_grad_()


def test_its_flops_and_its_stages_follow():
    plan = plan_with(1, "")
    assert plan.flops_per_token() == 6 * (LAYERS * 3 * UNITS * WIDTH + VOCAB * WIDTH)
    # the head is work too
    assert [len(stage.blocks) for stage in plan_with(2, "pp=2").stages] == [3, 2]
    cut = plan_with(2, "pp=2", "pipeline.stages=[2,1]")
    assert cut.stages[1].specs()[0][0].name == "blocks.2.unit.norm.weight"


def test_flops_are_of_the_share_of_a_matrix_that_a_token_meets():
    one_of_four = replace(matrix("expert.up.weight", UNITS, WIDTH, ROWS), active=0.25)
    assert product_flops([one_of_four, *norm("norm", WIDTH, EPS)]) == 6 * UNITS * WIDTH / 4


def test_a_stage_ends_after_a_whole_layer():
    from mpitrain.errors import ConfigError

    with pytest.raises(
        ConfigError, match=r"found half of block 1, which has 1 layer; end a stage after a whole block"
    ):
        _ = plan_with(2, "pp=2", "pipeline.stages=[1.5,1.5]").stages

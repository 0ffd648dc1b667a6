"""The optimisers on one rank, over random gradients.

Equal to plain loops, wherever parameters are cut; a restart resumes.

On more ranks than one: test_optim_training.py.
"""

from itertools import pairwise

import pytest
import torch
from oracle import muon_step, sgd_step

from mpitrain import config as settings
from mpitrain.plan.settings.resolve import resolve

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]
SETTINGS = ("model.layers=1", "model.width=32", "model.heads=4", "model.kv_heads=2", "model.ffn=100")
LR = 0.02


def resolved(*given, ranks=1):
    return resolve(settings.load(None, (*SETTINGS, *given)), ranks, 259)


@pytest.fixture
def alone(world):
    """A mesh of one rank."""
    if world.size > 1:
        pytest.skip("runs on 1 rank")
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    plan = plan_of(resolved())
    mesh = build_mesh(plan, world)
    yield mesh
    mesh.free()


def gradients(config, num_steps):
    """Return the initial weights and `num_steps` gradients, random and flat, by the parameter's name."""
    from mpitrain.model.families.catalog import plan_of

    dice = torch.Generator().manual_seed(1)
    specs = plan_of(config).parameters()
    every = [
        [torch.randn(spec.numel, generator=dice, dtype=torch.float64) for spec in specs]
        for _ in range(num_steps + 1)
    ]
    first, *others = [dict(zip([spec.name for spec in specs], flat)) for flat in every]
    return first, others


class Optimising:
    """Weights under an optimiser, as pieces that begin at multiples of 1024 elements.

    At `cuts`, counted in these.
    """

    def __init__(self, config, mesh, dtype=torch.float64, cuts=()):
        from mpitrain.model.families.catalog import plan_of
        from mpitrain.optim.optimizer import optimizer_of
        from mpitrain.parallel.zero.shards import ParameterShard

        plan = plan_of(config)
        initial, self.every = gradients(config, 5)
        self.weights = {name: w.to(dtype) for name, w in initial.items()}
        self.grads = {name: torch.empty_like(w) for name, w in self.weights.items()}
        self.pieces = []
        for spec in plan.parameters():
            bounds = [0, *(1024 * cut for cut in cuts if 1024 * cut < spec.numel), spec.numel]
            parts = [(self.weights[spec.name][a:b], self.grads[spec.name][a:b]) for a, b in pairwise(bounds)]
            self.pieces += [
                ParameterShard(spec, a, b, *part) for (a, b), part in zip(pairwise(bounds), parts)
            ]
        self.optimizer = optimizer_of(
            config, plan.stages, self.pieces, mesh, torch.empty(0, dtype=dtype), torch.device("cpu")
        )

    def steps(self, numbers):
        """Take the steps of these numbers, counted from 1; return the weights."""
        for step in numbers:
            for name, grad in self.every[step - 1].items():
                self.grads[name].copy_(grad)
            self.optimizer.step(LR * step)
            assert all(
                torch.equal(self.grads[name], grad.to(self.grads[name].dtype))
                for name, grad in self.every[step - 1].items()
            )
        return self.weights

    def states(self):
        """Return {(name in a checkpoint, parameter): flat tensor}."""
        found = {}
        for piece in self.pieces:
            for name, x in self.optimizer.moments(piece):
                found.setdefault((name, piece.spec.name), []).append(x.clone())
        return {key: torch.cat(parts) for key, parts in found.items()}

    def restore(self, weights, states, num_updates):
        for piece in self.pieces:
            piece.weight.copy_(weights[piece.spec.name][piece.begin : piece.end])
            for name, x in self.optimizer.moments(piece):
                x.copy_(states[name, piece.spec.name][piece.begin : piece.end])
        self.optimizer.set_step(num_updates)


def require_equal_to_a_loop(config, mesh, update):
    """Compare three steps with `update(weights, grads, states, step, lr)` of whole matrices.

    Return the names of the states.
    """
    from mpitrain.model.families.catalog import plan_of

    shapes = {spec.name: spec.shape for spec in plan_of(config).parameters()}
    initial, every = gradients(config, 3)
    weights = {name: w.view(shapes[name]) for name, w in initial.items()}
    states = {}
    found = Optimising(config, mesh)
    for step, grads in enumerate(every, 1):
        update(weights, {name: g.view(shapes[name]) for name, g in grads.items()}, states, step, LR * step)
    for name, w in found.steps((1, 2, 3)).items():
        error = ((w - weights[name].flatten()).abs().max() / w.abs().max()).item()
        assert error < 1e-13, f"{name}: {error:.1e}"
    return found.states().keys()


# ---------------------------------------------------------------- equal to plain loops


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.8, True)])
def test_sgd_equals_a_plain_loop(alone, momentum, nesterov):
    config = resolved(
        "optimizer.name=sgd", f"optimizer.momentum={momentum}", f"optimizer.nesterov={str(nesterov).lower()}"
    )
    states = require_equal_to_a_loop(
        config, alone, lambda *a: sgd_step(*a, momentum=momentum, nesterov=nesterov, decay=0.1)
    )
    assert {name for name, _ in states} == ({"sgd/momentum"} if momentum else set())


@pytest.mark.parametrize(
    ("momentum", "nesterov", "ns_steps"), [(0.95, True, 5), (0.9, False, 3), (0.0, False, 1)]
)
def test_muon_equals_a_plain_loop(alone, momentum, nesterov, ns_steps):
    keys = (f"momentum={momentum}", f"nesterov={str(nesterov).lower()}", f"ns_steps={ns_steps}")
    config = resolved("optimizer.name=muon", *(f"optimizer.{key}" for key in keys))
    kept = dict(
        momentum=momentum, nesterov=nesterov, ns_steps=ns_steps, betas=(0.9, 0.95), eps=1e-8, decay=0.1
    )
    states = require_equal_to_a_loop(config, alone, lambda *a: muon_step(*a, **kept))
    hidden = {name for state, name in states if state == "muon/momentum"}
    assert len(hidden) == 7 and {name.split(".")[-2] for name in hidden} == {
        "q",
        "k",
        "v",
        "output",
        "gate",
        "up",
        "down",
    }
    others = {name for state, name in states if state in ("adam/m", "adam/v")}
    assert others == {
        "embedding.weight",
        "blocks.0.attention.norm.weight",
        "blocks.0.ffn.norm.weight",
        "head.norm.weight",
    }


def test_an_optimiser_in_a_file_of_its_own_equals_a_plain_loop(alone):
    """tests/support/lion.py, which is all that there is of it: one file, no line elsewhere."""

    def plain(weights, grads, states, step, lr):
        for name, w in weights.items():
            m = states.setdefault(name, torch.zeros_like(w))
            w *= 1 - lr * (0.1 if w.ndim > 1 else 0)
            w -= lr * (0.9 * m + 0.1 * grads[name]).sign()
            m.copy_(0.98 * m + 0.02 * grads[name])

    config = resolved("optimizer.name=lion:LION", "optimizer.betas=[0.9, 0.98]")
    states = require_equal_to_a_loop(config, alone, plain)
    assert {name for name, _ in states} == {"lion/m"}


def test_a_step_of_muon_is_that_of_torch(alone):
    """But for torch's iterations, which are in bf16, with 8 bits."""
    found = Optimising(resolved("optimizer.name=muon"), alone, torch.float32)
    from mpitrain.model.families.catalog import plan_of

    shape = {spec.name: spec.shape for spec in plan_of(resolved()).parameters()}
    before = {
        name: w.view(shape[name]).clone()
        for name, w in found.weights.items()
        if ".ffn." in name and "norm" not in name
    }
    found.steps((1,))
    for name, w in before.items():
        expected = w.clone()
        expected.grad = found.grads[name].view(shape[name])
        torch.optim.Muon(
            [expected], lr=LR, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ).step()
        error = (found.weights[name].view(shape[name]) - expected).norm() / (expected - w).norm()
        assert error < 0.03, f"{name}: {error:.1e}"


# ---------------------------------------------------------------- cuts, restarts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "given",
    [
        "name=adamw",
        "name=adamw moments=bf16",
        "name=sgd",
        "name=sgd nesterov=true",
        "name=sgd momentum=0",
        "name=sgd moments=bf16",
    ],
)
def test_bits_do_not_depend_on_where_a_parameter_is_cut(alone, given, dtype):
    config = resolved(*(f"optimizer.{key}" for key in given.split()))
    whole = Optimising(config, alone, dtype)
    weights = whole.steps((1, 2, 3))
    states = whole.states()
    for cuts in ((1,), (1, 2, 3), (3, 5)):
        cut = Optimising(config, alone, dtype, cuts)
        assert all(torch.equal(w, weights[name]) for name, w in cut.steps((1, 2, 3)).items())
        found = cut.states()
        assert found.keys() == states.keys() and all(torch.equal(found[key], states[key]) for key in states)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_a_restart_resumes_with_the_same_bits(alone, name, moments):
    """Muon's parts are cut only between ranks."""
    config = resolved(f"optimizer.name={name}", f"optimizer.moments={moments}")
    cuts = ((), ()) if name == "muon" else ((1, 3), (2,))
    weights = Optimising(config, alone, torch.float32).steps((1, 2, 3, 4, 5))
    stopped, resumed = (Optimising(config, alone, torch.float32, cut) for cut in cuts)
    resumed.restore(stopped.steps((1, 2)), stopped.states(), 2)
    assert all(torch.equal(w, weights[name]) for name, w in resumed.steps((3, 4, 5)).items())


# ---------------------------------------------------------------- who has what


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("num_shards", [1, 3, 8])
def test_parts_make_whole_matrices_and_the_work_is_divided(alone, tp, num_shards):
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.optim.matrices import dealt, holdings

    config = resolved(f"parallel.tp={tp}", "model.layers=6", "optimizer.name=muon", ranks=tp)
    plan = plan_of(config)
    held = holdings(config, plan.stages, num_shards)
    found = {}
    for holding in held:
        for name, part in holding.items():
            found[name] = found.get(name, 0) + part.length * (part.spec.copy == 0)
    specs = {spec.name: spec for spec in plan.parameters() if "blocks" in spec.name and len(spec.shape) == 2}
    assert found == {name: spec.numel for name, spec in specs.items()} and len(held) == tp * num_shards
    queues = dealt(held)
    assert sorted(name for queue in queues for name in queue) == sorted(specs)
    work = {name: spec.numel * min(spec.shape) for name, spec in specs.items()}
    loads = [sum(work[name] for name in queue) for queue in queues]
    assert max(loads) <= sum(loads) / len(loads) + max(work.values())


def test_a_matrix_stays_where_most_of_it_is(alone):
    """Two shards of one bucket: only matrices around the cut travel, and what one rank has too much of."""
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.optim.matrices import dealt, holdings

    plan = plan_of(resolved("model.layers=6", "optimizer.name=muon"))
    held = holdings(plan.config, plan.stages, 2)
    every = sum(part.length for holding in held for part in holding.values())
    stays = sum(
        held[rank][name].length
        for rank, queue in enumerate(dealt(held))
        for name in queue
        if name in held[rank]
    )
    assert stays > 0.8 * every

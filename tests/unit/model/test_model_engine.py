"""The engine's gradients are those of torch.autograd.grad, without the modules that it loads."""

import sys

import pytest
import torch
from conftest import LONG
from launch import finished
from torch.autograd.graph import get_gradient_edge

from mpitrain.kernels.engine import gradients

STEP = """
import sys, torch
from mpi4py import MPI
from mpitrain import config as settings
from mpitrain.actor.actor import Actor
from mpitrain.plan.settings.resolve import resolve
from mpitrain.model.families.catalog import plan_of
from mpitrain.actor.communicators import build_mesh

plan = plan_of(resolve(settings.load(None, sys.argv[1:]), 1, 256))
actor = Actor(plan, build_mesh(plan, MPI.COMM_WORLD), torch.device("cpu"))
shape = plan.config.batch.global_, plan.config.data.sequence + 1
before = set(sys.modules)
actor.run_step(1, actor.cutter.cut(torch.randint(0, 256, shape)), 1e-3)
print(*sorted(set(sys.modules) - before))
"""
SMALL = "model.layers=1", "model.width=32", "batch.global=2", "data.sequence=16"


@pytest.mark.parametrize(
    "more",
    [
        (),
        *(pytest.param((key,), marks=LONG) for key in ("model.family=mixtral", "memory.recompute=selective")),
    ],
    ids=str,
)
def test_a_step_loads_no_symbolic_algebra(more):
    """sympy and what torch has around it: 36 MB and a second of each rank, for shapes that are numbers."""
    done = finished([sys.executable, "-c", STEP, *SMALL, *more], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert not [name for name in loaded if name.startswith(("sympy", "torch.fx"))] and len(loaded) < 20, (
        loaded
    )


def made():
    x, w = (torch.randn(3, 4, generator=torch.Generator().manual_seed(n), requires_grad=True) for n in (1, 2))
    return [x * w, (x + w).exp()], [x, w], [torch.full((3, 4), 2.0), torch.full((3, 4), 0.5)]


def test_gradients_are_those_of_torch():
    outputs, inputs, given = made()
    expected = torch.autograd.grad(outputs, inputs, given, retain_graph=True)
    found = gradients([get_gradient_edge(y) for y in outputs], inputs, given)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_gradient_of_a_loss_need_not_be_given():
    outputs, inputs, _ = made()
    assert all(
        torch.equal(a, b)
        for a, b in zip(gradients([outputs[0].sum()], inputs, [None]), (inputs[1], inputs[0]))
    )


def test_a_gradient_of_another_shape_is_refused():
    outputs, inputs, _ = made()
    with pytest.raises(RuntimeError, match="shape"):
        gradients(outputs[:1], inputs, [torch.ones(7, 5)])

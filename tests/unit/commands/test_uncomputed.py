"""Tensors without memory: shapes are torch's own, nothing is written, torch loads no compiler for them."""

import subprocess
import sys

import pytest
import torch

from mpitrain.actor.uncomputed import Uncomputed

META = torch.device("meta")


def tensor(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device=META)


OPERATIONS = {
    "of each number": lambda x, row: x / row,
    "with a number": lambda x, row: 2 - x,
    "a square": lambda x, row: (x * 3 - 1).square(),
    "between two": lambda x, row: x.lerp(row, 0.5),
    "a logarithm": lambda x, row: torch.xlogy(row, row),
    "of another type": lambda x, row: x.double(),
    "like another": lambda x, row: torch.zeros_like(x, dtype=torch.bfloat16),
    "a sum": lambda x, row: x.sum(),
    "a sum of rows": lambda x, row: x.sum(0),
    "a norm": lambda x, row: torch.linalg.vector_norm(x).clamp(min=1e-7),
    "a product": lambda x, row: x @ x.mT,
    "a product and a sum": lambda x, row: torch.addmm(x @ x.mT, x, x.mT, beta=2.0),
    "of many matrices": lambda x, row: x.expand(5, -1, -1) @ row[:, None],
    "of many by many": lambda x, row: x.expand(5, 1, -1, -1) @ x.mT.expand(2, -1, -1),
    "of a vector": lambda x, row: x @ row,
    "joined": lambda x, row: torch.cat([x.new_empty(0), x.flatten(), row]),
    "joined sideways": lambda x, row: torch.cat([x, x], 1),
    "places": lambda x, row: torch.arange(2, 7, dtype=torch.int32, device=META),
    "views": lambda x, row: x.flatten()[2:].view(torch.int32),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_result_has_the_shape_and_the_type_that_torch_gives_it(name):
    x, row = tensor(3, 4), tensor(4)
    expected = OPERATIONS[name](x, row)
    with Uncomputed():
        found = OPERATIONS[name](x, row)
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, META)


def test_what_would_be_changed_is_given_back():
    x, row = tensor(3, 4), tensor(4)
    with Uncomputed():
        same = [x.add_(row), x.copy_(row), x.zero_(), torch.bitwise_right_shift(x, 2, out=x)]
        y = x
        y += row
        assert all(each is x for each in [*same, y])


def test_others_are_computed():
    with Uncomputed():
        x = torch.arange(3.0)
        x += 1
        assert (x * x).sum().item() == 14 and torch.cat([x, x]).tolist() == [1, 2, 3, 1, 2, 3]


REHEARSED = """
import sys
from mpitrain import config as settings
from mpitrain.actor.rehearsal import Rehearsal
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.settings.resolve import resolve

for keys in {cases!r}:
    plan = plan_of(resolve(settings.load(None, tuple(keys.split())), 2, 256))
    Rehearsal(plan, 0).recipe()
    Rehearsal(plan, 1).evaluation()
    loaded = {{"sympy", "torch._dynamo"}} & sys.modules.keys()
    assert not loaded, (keys, loaded)
"""
CASES = [
    "parallel.dp=2",
    "parallel.tp=2 parallel.async_tp=true precision.compute=fp16",
    "parallel.pp=2 pipeline.schedule=zbv precision.compute=bf16",
    "parallel.dp=2 optimizer.name=muon optimizer.moments=bf16",
    "parallel.dp=2 parallel.zero=3 precision.compute=fp8",
    "parallel.dp=2 parallel.ep=2 model.family=mixtral experts.count=4",
    "parallel.cp=2 memory.recompute=selective numerics.reproducible=layout",
]


def test_torch_loads_no_compiler_for_a_rehearsal():
    """It would take a second, at the end of each run and of `mpitrain program --traffic`."""
    done = subprocess.run(
        [sys.executable, "-c", REHEARSED.format(cases=CASES)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]

"""Blocks as lists: an operator and its backward are adjoint, <C x, z> = <x, C* z>, replicated
tensors counted once.
"""

import pytest
from conftest import agree

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]


@pytest.mark.parametrize("name", ["copy", "sum", "gather", "scatter", "exchange"])
def test_each_communication_is_adjoint_to_its_backward(world, name):
    import torch

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh
    from mpitrain.parallel.communication import Communication
    from mpitrain.parallel.microbatch import Context
    from mpitrain.parallel.walk import backward, forward, run

    mesh = Mesh(world, Grid({"tp": world.size}), timeout_s=30)
    block = [Communication(name, mesh["tp"])]

    def random(shape, replicated):
        seed = torch.Generator().manual_seed(99 if replicated else world.rank)
        return torch.randn(shape, generator=seed, dtype=torch.float64)

    def dot(a, b, replicated):
        here = (a * b).sum().item()
        return here if replicated else world.allreduce(here)

    x = random((2 * world.size, 3), name == "copy")
    y, saved = run(forward(block, x.clone(), Context()))
    z = random(y.shape, name == "sum")
    back = run(backward(block, saved, z.clone()))
    left = dot(y, z, name == "sum")
    right = dot(x, back, name == "copy")
    mesh.free()
    agree(world, abs(left - right) < 1e-9 * (1 + abs(left)), f"{name}: {left} and {right}")


def test_a_block_with_communications_equals_the_whole_product(world):
    """Column-parallel, row-parallel and the sum between.

    The gradient of the input is that of the unsplit product.
    """
    import torch

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh
    from mpitrain.model.segment import Segment
    from mpitrain.parallel.communication import Communication
    from mpitrain.parallel.microbatch import Context
    from mpitrain.parallel.walk import backward, forward, run

    random = torch.Generator().manual_seed(1)
    up, down = (torch.randn(8 * world.size, 4, generator=random, dtype=torch.float64) for _ in range(2))
    x, grad = (torch.randn(5, 4, generator=random, dtype=torch.float64) for _ in range(2))

    class Half(Segment):
        def compute(self, x, context, tape):
            mine = slice(8 * world.rank, 8 * world.rank + 8)
            return torch.tanh(x @ up[mine].T) @ down[mine]

    mesh = Mesh(world, Grid({"tp": world.size}), timeout_s=30)
    block = [Communication("copy", mesh["tp"]), Half(), Communication("sum", mesh["tp"])]
    y, saved = run(forward(block, x, Context()))
    back = run(backward(block, saved, grad))
    whole = x.clone().requires_grad_()
    expected = torch.tanh(whole @ up.T) @ down
    expected.backward(grad)
    mesh.free()
    agree(world, torch.allclose(y, expected, rtol=1e-12) and torch.allclose(back, whole.grad, rtol=1e-12))

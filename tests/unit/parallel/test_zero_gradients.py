"""The gradient buffers of a step.

Zero for whoever looks, though nobody writes the zeros that a first product would write over.
"""

import pytest
import torch

from mpitrain.kernels.products import add_product
from mpitrain.model.linear import WeightGradient
from mpitrain.parallel.zero.parameters import Parameter
from mpitrain.parallel.zero.shards import Gradient, ZeroGroup
from mpitrain.plan.declared.parameters import Spec
from mpitrain.plan.division.buckets import map_bucket
from mpitrain.plan.predict.arena import Arena

SHAPES = {"w": (48, 32), "v": (40,), "none": (64, 32), "again": (48, 32)}


def gradient_of(stage):
    """Return a gradient that begins a step, whose memory has something of the step before
    everywhere, and its parameters by name.
    """
    mapped = map_bucket(tuple(Spec(name, shape) for name, shape in SHAPES.items()), 1)
    zero_group = ZeroGroup(stage)
    gradient = Gradient(mapped, torch.float32, torch.device("cpu"), zero_group)
    parameters = {spec.name: Parameter(spec) for spec in mapped.specs}
    for parameter in parameters.values():
        gradient.bind(parameter)
    if stage >= 2:
        zero_group.gradients.reserve(
            Arena(mapped.length, {"training": [0, 0]}), torch.float32, torch.device("cpu")
        )
        zero_group.gradients.begin("training")
        zero_group.gradients.give_back(zero_group.gradients.borrow(mapped.length).fill_(torch.nan))
    else:
        gradient.whole.fill_(torch.nan)
    gradient.zero()
    gradient.hold(0)
    return gradient, parameters


@pytest.mark.parametrize("stage", [0, 2])
def test_what_nobody_adds_to_is_zero_and_what_was_there_before_is_gone(stage):
    gradient, parameters = gradient_of(stage)
    x = torch.randn(8, 32)
    grads = [torch.randn(8, 48) for _ in range(3)]
    WeightGradient((parameters["w"],), x, grads[:1]).add()
    parameters["v"].grad += 1
    for grad in grads[1:]:
        WeightGradient((parameters["again"],), x, [grad]).add()
    gradient.hold(0)  # the next microbatch: nothing is forgotten
    gradient.finish()
    held = gradient.whole.square().sum()  # before anybody looks by the parameters
    expected = {
        "w": grads[0].t() @ x, "v": torch.ones(40), "none": torch.zeros(64, 32),
        "again": grads[1].t() @ x + grads[2].t() @ x
    }  # fmt: skip
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, expected[name])
    # nothing is between parameters
    torch.testing.assert_close(held, sum(x.square().sum() for x in expected.values()))


@pytest.mark.parametrize("shape", [(8, 4, 3), (256, 384, 1024), (256, 128, 384)])
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_first_product_has_the_bits_of_one_that_is_added_to_zeros(shape, dtype, rounded):
    """Which microbatch is the first differs between layouts."""
    rows, height, width = shape
    a = torch.randn(rows, height, dtype=dtype)
    b = torch.randn(rows, width, dtype=dtype)
    kind = torch.promote_types(dtype, torch.float32)
    added = torch.zeros(height, width, dtype=kind)
    written = torch.full((height, width), torch.nan, dtype=kind)
    add_product(added, a, b, rounded)
    add_product(written, a, b, rounded, first=True)
    assert torch.equal(added, written)

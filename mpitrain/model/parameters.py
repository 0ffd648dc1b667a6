"""The parameters of one stage: named, in flat buffers, with gradients grouped into buckets.

Weights lie in one flat buffer, gradients in one flat buffer per bucket, so that a bucket is reduced with one operation and without
packing. Every tensor begins on a cache line: matrix products may round differently on differently aligned memory, and the same
parameter must give the same bits in every layout.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from mpitrain.model.init import normal
from mpitrain.slicing import Spec

ALIGN = 64  # bytes


@dataclass
class Parameter:
    """One use of a parameter by a stage: `data` and `grad` are views into the stage's buffers.

    A tied embedding is used twice: on one rank the two share `data`, and each has a gradient of its own.
    """

    spec: Spec
    data: torch.Tensor = field(default=None, repr=False)
    grad: torch.Tensor = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.spec.name


def initialise(parameters: Iterable[Parameter], seed: int) -> None:
    """Fill `data` from (seed, name, index in the whole parameter): the same elements in every layout."""
    for parameter in parameters:
        spec = parameter.spec
        if spec.std == 0:
            parameter.data.fill_(1.0)
        else:
            parameter.data.copy_(_box(seed, spec))


def _box(seed: int, spec: Spec) -> torch.Tensor:
    """Return the initial values of the box that a spec is of its matrix: its rows are a run of elements, its columns are cut out."""
    width = spec.whole[1]
    begin = spec.offset[0] * width
    rows = normal(seed, spec.name, begin, begin + spec.shape[0] * width, spec.std).view(spec.shape[0], width)
    return rows[:, spec.offset[1] : spec.offset[1] + spec.shape[1]]


Allocate = Callable[[int], np.ndarray]  # bytes -> zeroed host memory


def flat_buffer(
    specs: Iterable[Spec], dtype: torch.dtype, device: torch.device, allocate: Allocate | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return one zeroed buffer for `specs` and a view of it for each, every view on a cache line.

    allocate: where host memory comes from, if not from torch: an axis gives memory that its other ranks can read.
    """
    step = ALIGN // dtype.itemsize
    specs = list(specs)
    starts, length = [], 0
    for spec in specs:
        starts.append(length)
        length += -(-spec.numel // step) * step
    if allocate is not None and device.type == "cpu" and length:
        memory = torch.from_numpy(allocate(length * dtype.itemsize)).view(dtype)
    else:
        memory = torch.zeros(length, dtype=dtype, device=device)
    return memory, [memory[at : at + spec.numel].view(spec.shape) for at, spec in zip(starts, specs)]

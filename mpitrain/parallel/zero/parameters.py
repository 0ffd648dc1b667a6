"""A named parameter as the model sees it, and its initial values."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from mpitrain.layout.parameters import Spec
from mpitrain.parallel.zero.initial import normal


@dataclass
class Parameter:
    """One use of a parameter by a stage: `data` and `grad` are views into flat buffers, or None while those aren't there.

    A tied embedding is used twice: on one rank the two share `data`, and each has a gradient of its own.
    rounded: products that are added to `grad` are rounded to the type of their factors.
    """

    spec: Spec
    data: torch.Tensor = field(default=None, repr=False)
    grad: torch.Tensor = field(default=None, repr=False)
    rounded: bool = False

    @property
    def name(self) -> str:
        return self.spec.name


def initialise(parameters: Iterable[Parameter], seed: int) -> None:
    """Fill `data` from (seed, name, index in the whole parameter): the same elements in every layout."""
    for parameter in parameters:
        spec = parameter.spec
        if spec.std == 0:
            parameter.data.fill_(spec.constant)
        elif not parameter.data.is_meta:
            parameter.data.copy_(_box(seed, spec))


def _box(seed: int, spec: Spec) -> torch.Tensor:
    """Return the initial values of the box that a spec is of a matrix, or of a stack of some."""
    height, width = spec.whole[-2:]
    first, left = spec.offset[-2:]
    stacked = range(spec.offset[0], spec.offset[0] + spec.shape[0]) if len(spec.whole) > 2 else range(1)
    return torch.stack([_part(seed, spec, (number * height + first) * width, left) for number in stacked]).view(spec.shape)


def _part(seed: int, spec: Spec, begin: int, left: int) -> torch.Tensor:
    """Return the part of one matrix: its rows are a run of elements, its columns are cut out."""
    (rows, columns), width = spec.shape[-2:], spec.whole[-1]
    return normal(seed, spec.name, begin, begin + rows * width, spec.std).view(rows, width)[:, left : left + columns]

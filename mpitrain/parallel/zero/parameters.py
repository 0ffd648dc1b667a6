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
            parameter.data.fill_(spec.constant)
        elif not parameter.data.is_meta:
            parameter.data.copy_(_box(seed, spec))


def _box(seed: int, spec: Spec) -> torch.Tensor:
    """Return the initial values of the box that a spec is of its matrix: its rows are a run of elements, its columns are cut out."""
    width = spec.whole[1]
    begin = spec.offset[0] * width
    rows = normal(seed, spec.name, begin, begin + spec.shape[0] * width, spec.std).view(spec.shape[0], width)
    return rows[:, spec.offset[1] : spec.offset[1] + spec.shape[1]]

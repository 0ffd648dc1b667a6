"""A named parameter as the model sees it."""

from dataclasses import dataclass, field

import torch

from mpitrain.layout.parameters import Spec


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

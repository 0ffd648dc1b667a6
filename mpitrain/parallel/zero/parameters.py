"""A named parameter as the model sees it."""

import torch

from mpitrain.plan.declared.parameters import Spec


class Parameter:
    """One use of a parameter by a stage.

    `data` and `grad` are views into flat buffers, or None while those aren't there.

    A tied embedding is used twice: on one rank the two share `data`, and each has a gradient of its
    own.
    rounded: products that are added to `grad` are rounded to the type of their factors.
    """

    def __init__(
        self,
        spec: Spec,
        data: torch.Tensor | None = None,
        grad: torch.Tensor | None = None,
        rounded: bool = False,
    ):
        self.spec = spec
        self.data = data
        self.grad = grad
        self.rounded = rounded

    def __repr__(self) -> str:
        return f"Parameter({self.spec!r})"

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def grad(self) -> torch.Tensor | None:
        """What has been added to the gradient."""
        self.settle()
        return self._grad

    @grad.setter
    def grad(self, there: torch.Tensor | None) -> None:
        self._grad = there
        self._stale = False

    def begin(self) -> None:
        """Let the gradient be zero.

        What is in its memory stays until somebody looks, or something is written over it.
        """
        self._stale = True

    def settle(self) -> None:
        """Have what was added to the gradient in its memory: zeros, where nothing was."""
        if self._stale:
            self._grad.zero_()
            self._stale = False

    def sum_and_first(self) -> tuple[torch.Tensor, bool]:
        """Return the gradient for a product to be added to; and whether it is the first.

        Then it is to be written over what is there.
        """
        first = self._stale
        self._stale = False
        return self._grad, first

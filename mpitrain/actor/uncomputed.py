"""Tensors without memory, of which nothing is computed.

torch works out many results on its device `meta` in Python, and loads its compiler and a library of symbolic
algebra for that: a second, at the end of each run that compares what it sent with what was predicted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

# results have the shape that their operands have together
OF_EACH_NUMBER = frozenset((
    "add", "sub", "mul", "div", "true_divide", "neg", "lerp", "clamp", "square", "pow", "sqrt", "xlogy",
    "sign", "empty_like", "zeros_like", "double", "float",
    "__add__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__neg__",
))  # fmt: skip
PRODUCTS = frozenset(("matmul", "__matmul__", "mm", "addmm"))  # the last two operands are multiplied
TYPES = {"double": torch.float64, "float": torch.float32}  # of results; of others, their operand's
IN_PLACE = frozenset(("__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__"))
OF_THE_SHAPE = frozenset((
    "requires_grad_", "detach_", "resize_", "set_", "squeeze_", "unsqueeze_", "transpose_", "t_",
))  # fmt: skip
OF_ONE_NUMBER = frozenset(("sum", "mean", "norm", "vector_norm", "linalg_vector_norm"))


class Uncomputed(TorchFunctionMode):
    """While it is entered, operations give tensors of the right shape and leave what they would change.

    Views, and what isn't named in this file, are torch's own.
    """

    def __torch_function__(
        self,
        function: Callable,
        types: Sequence[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        tensors = [
            tensor for tensor in (args[0] if name == "cat" else args) if isinstance(tensor, torch.Tensor)
        ]
        if name == "arange" and torch.device(kwargs.get("device") or "cpu").type == "meta":
            return torch.empty(len(range(*args)), dtype=kwargs.get("dtype"), device="meta")
        if not any(tensor.is_meta for tensor in tensors):
            return function(*args, **kwargs)
        if "out" in kwargs or _changes_its_first(name):
            return kwargs.get("out", args[0])
        shape = _shape_of(name, tensors, args[1:], kwargs)
        if shape is None:
            return function(*args, **kwargs)
        return tensors[0].new_empty(shape, dtype=kwargs.get("dtype", TYPES.get(name)))


def _shape_of(
    name: str, tensors: Sequence[torch.Tensor], more: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[int] | None:
    """Return the shape of a result; None: left to torch. more: given after the first operand."""
    if name in OF_EACH_NUMBER:
        return np.broadcast_shapes(*(tuple(tensor.shape) for tensor in tensors))
    if name in OF_ONE_NUMBER and not more and kwargs.keys() <= {"dtype"}:
        return ()
    if name in PRODUCTS and min(tensor.dim() for tensor in tensors[-2:]) > 1:
        a, b = (tuple(tensor.shape) for tensor in tensors[-2:])
        return (*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
    if name == "cat":
        return _joined(tensors, *more, **kwargs)
    return None


def _changes_its_first(name: str) -> bool:
    """Return whether it is one like add_ or +=, which give what they change: its numbers, not its shape."""
    if name in OF_THE_SHAPE:
        return False
    return name in IN_PLACE or (name.endswith("_") and not name.startswith("_"))


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> list[int]:
    """Return the shape of tensors that are joined; empty ones of one dimension go with any."""
    tensors = [tensor for tensor in tensors if tensor.shape != (0,)] or tensors
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    return shape

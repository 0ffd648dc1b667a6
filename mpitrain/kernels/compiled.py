"""The functions between products, each fused by torch.compile: `run.compile`.

    as they are  a kernel an operation, each reads and writes all its numbers
    compiled     a kernel a function or two; 16-bit numbers are widened, computed with and rounded
                 once

A function is compiled when it first meets a type, shape and strides, by inductor's C++ on a CPU and
Triton on a GPU; what is made is in inductor's cache (TORCHINDUCTOR_CACHE_DIR), which the ranks of a
node share: one of them compiles, the others wait for its lock.
"""

import os
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

import torch

from mpitrain.kernels.activation_functions import SILU, GatedProduct
from mpitrain.kernels.fp8 import in_orders, quantise_by
from mpitrain.kernels.functions import EAGER, Functions, Tensor
from mpitrain.kernels.precision import wide

THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def functions_of(compile_: bool, deterministic: bool, device: torch.device) -> Functions:
    """Return what layers call. What has no memory isn't computed, and not compiled for.

    On a GPU silu(gate) is made again in any case: a plan doesn't know whether a GPU can compile.
    """
    if compile_ and device.type == "cuda":
        return replace(compiled(deterministic), quantise=quantise_by(Fused(in_orders, deterministic)))
    if compile_ and device.type != "meta":
        return compiled(deterministic)
    return replace(EAGER, keep_activated=False) if device.type == "cuda" else EAGER


def compiled(deterministic: bool, environment: MutableMapping[str, str] = os.environ) -> Functions:
    """Return the functions, to be compiled when they are first called.

    deterministic: choose no kernel by a clock, which would be another one on each rank.
    """
    environment.setdefault(THREADS, "1")  # else each rank starts a process for each core
    as_they_are = {name: getattr(EAGER, name) for name in ("norm", "norm_again", "norm_backward")}
    others = {
        "gated": _gated,
        "gated_backward": _gated_backward,
        "turned": _turned,
        "log_sums": _log_sums,
        "to_gradients": _to_gradients,
    }
    fused = {name: Fused(function, deterministic) for name, function in (as_they_are | others).items()}
    return Functions(**fused, keep_activated=False)


class Fused:
    """A function of tensors and numbers, compiled once for each type, shape and strides of them,
    and for each value.

    torch's own look-up compares more, takes 11 us longer (benchmarks/functions.py), compiles once
    more for tensors that ask for a gradient, and gives up after some shapes.
    """

    def __init__(self, function: Callable, deterministic: bool):
        with torch._dynamo.config.patch(enable_aot_compile=True):  # off in torch 2.11, on in 2.13
            self._compile = torch.compile(
                function, dynamic=False, fullgraph=True, options={"deterministic": deterministic}
            )
        self._made: dict[tuple, Callable] = {}

    def __call__(self, *arguments: Any) -> Any:
        key = tuple([(x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else x for x in arguments])
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(arguments)
        return made(*arguments)

    @torch.no_grad()
    def _make(self, arguments: tuple) -> Callable:
        plain = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments)
        made = self._compile.aot_compile((plain, {}))
        made.disable_guard_check()  # the key says it all: there is no other state, and one device
        return made


GATED = GatedProduct(SILU)  # made here: torch 2.11 compiles no function that makes it


# ----------------------------------- what is written otherwise: it is one pass then, without pieces


def _gated(gate: Tensor, up: Tensor) -> tuple[Tensor, None]:
    """silu(gate) is made again in the backward: to read it would take longer."""
    return SILU.activation(gate) * SILU.scale(up), None


def _gated_backward(
    grad: Tensor, gate: Tensor, up: Tensor, activated: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same, as a function: torch compiles no method."""
    return GATED.backward(grad, gate, up, activated)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sense: int) -> Tensor:
    """In memory the heads of a position are side by side: what comes next wants them so, whatever x is."""
    exact = x.transpose(1, 2).to(cos.dtype)
    width = 2 * cos.shape[-1]
    a, b = exact[..., :width].chunk(2, -1)
    cos = cos[:, None]
    sin = sin[:, None] * sense
    parts = a * cos - b * sin, b * cos + a * sin, exact[..., width:]
    return torch.cat(parts, -1).to(x.dtype).transpose(1, 2)


def _log_sums(logits_NV: Tensor) -> Tensor:
    return torch.logsumexp(logits_NV.to(wide(logits_NV.dtype)), -1)


def _to_gradients(
    logits_NV: Tensor,
    log_sum_N: Tensor,
    targets_N: Tensor,
    here_N: Tensor,
    factor_N: Tensor,
    soft_cap: float = 0.0,
) -> None:
    softmax_NV = (logits_NV.to(log_sum_N.dtype) - log_sum_N[:, None]).exp()
    at_NV = (torch.arange(logits_NV.shape[1], device=logits_NV.device) == targets_N[:, None]) & here_N[
        :, None
    ]
    grad_NV = (softmax_NV - at_NV.to(softmax_NV.dtype)) * factor_N[:, None]
    if soft_cap:
        grad_NV = grad_NV * (1 - (logits_NV.to(log_sum_N.dtype) / soft_cap).square())
    logits_NV.copy_(grad_NV)

"""Operations between matrix products.

norm, gated product, rotary positions, cross-entropy; each way back beside its way there.

Pure functions of tensors, without autograd: the forward and backward of functions of our own call
them (model/selective.py, rotary.py, embedding_and_head.py). As they are, each operation is a kernel
and a pass over memory; `run.compile` fuses all of one function into one (compiled.py beside this
file). Those that have to be written otherwise for that are there. Same type, shape and strides:
same code, same bits, whichever stage calls them.

N positions of a microbatch, R some of them, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from mpitrain.kernels.activation_functions import SILU, Activation, GatedProduct
from mpitrain.kernels.fp8 import Quantise, quantise_in
from mpitrain.kernels.precision import wide
from mpitrain.plan.declared.probabilities import LOGITS, LOGITS_ON_A_DEVICE

LOG2_E = math.log2(math.e)
Tensor = torch.Tensor


def norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return RMSNorm(x) (arXiv:1910.07467), x with the norm 1, and by what x is multiplied for that.

    weight: in the type of x, or wider.

    Its statistics are fp32 at least: in fp16 the square of a norm is infinite from an RMS of 6 on
    at a width of 2048.
    """
    exact = x.to(wide(x.dtype))
    scale = torch.rsqrt(
        torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps)
    )
    unit = _scaled(x, exact, scale)
    return (unit * weight).to(x.dtype), unit, scale


def norm_again(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two of these once more."""
    unit = _scaled(x, x.to(scale.dtype), scale)
    return (unit * weight).to(x.dtype), unit


def _scaled(x: Tensor, exact: Tensor, scale: Tensor) -> Tensor:
    """Return x * scale in the type of x, rounded once.

    exact: x in the type of `scale`; it is used up, unless it is x.
    """
    return x * scale if exact is x else exact.mul_(scale).to(x.dtype)


def norm_backward(grad: Tensor, weight: Tensor, unit: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and of the weight: fewer passes over memory than autograd's."""
    product = grad * unit
    along = (product.to(weight.dtype) @ weight).div_(weight.shape[0]).unsqueeze(-1)
    of_x = (grad * weight).addcmul_(unit.to(weight.dtype), along, value=-1).mul_(scale)
    return of_x.to(grad.dtype), product.flatten(0, -2).sum(0)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return LayerNorm(x) (arXiv:1607.06450), x with the mean 0 and the variance 1, and by what x less its
    mean is multiplied for that. Statistics are fp32 at least.
    """
    exact = x.to(wide(x.dtype))
    centred = exact - exact.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True).add_(eps))
    unit = centred.mul_(scale).to(x.dtype)
    return torch.addcmul(bias, unit, weight), unit, scale


def layer_norm_again(x: Tensor, weight: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two of these once more."""
    exact = x.to(scale.dtype)
    unit = (exact - exact.mean(-1, keepdim=True)).mul_(scale).to(x.dtype)
    return torch.addcmul(bias, unit, weight), unit


def layer_norm_backward(
    grad: Tensor, weight: Tensor, unit: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the weight and of the bias."""
    product = grad * unit
    along = (product @ weight).div_(weight.shape[0]).unsqueeze(-1)
    mean = (grad @ weight).div_(weight.shape[0]).unsqueeze(-1)
    of_x = (grad * weight).sub_(mean).addcmul_(unit, along, value=-1).mul_(scale)
    return of_x.to(grad.dtype), product.flatten(0, -2).sum(0), grad.flatten(0, -2).sum(0)


def turned(x: Tensor, cos: Tensor, sin: Tensor, sense: int) -> Tensor:
    """Return x [B, H, T, C] turned by its positions, halves rotated; by -1 it is turned back.

    Features for which there is no angle stay. In memory as x.
    """
    exact = x.to(cos.dtype)
    y = torch.empty_like(exact)
    width = 2 * cos.shape[-1]
    (a, b), (c, d) = (tensor[..., :width].chunk(2, -1) for tensor in (exact, y))
    torch.mul(a, cos, out=c).addcmul_(b, sin, value=-sense)
    torch.mul(b, cos, out=d).addcmul_(a, sin, value=sense)
    y[..., width:] = exact[..., width:]
    return y.to(x.dtype)


def log_sums(logits_NV: Tensor) -> Tensor:
    """Return the log of the sum of the exponentials of each position [N], in fp32 at least."""
    found_N = logits_NV.new_empty(len(logits_NV), dtype=wide(logits_NV.dtype))
    if not logits_NV.is_cpu:
        return _log_sums_on_a_device(logits_NV, found_N)
    for rows in _pieces(logits_NV):
        exact_RV = logits_NV[rows].to(found_N.dtype)
        most_R1 = exact_RV.amax(-1, keepdim=True)
        found_N[rows] = _exp(exact_RV - most_R1).sum(-1).log_().add_(most_R1.squeeze(-1))
    return found_N


def _log_sums_on_a_device(logits_NV: Tensor, found_N: Tensor) -> Tensor:
    """Fill in the same by a kernel that widens and sums in one. Of the largest logit nothing gets lost."""
    for rows in _pieces(logits_NV):
        most_R = torch.log_softmax(logits_NV[rows], -1, dtype=found_N.dtype).amax(-1)
        found_N[rows] = logits_NV[rows].amax(-1).to(found_N.dtype).sub_(most_R)
    return found_N


def to_gradients(
    logits_NV: Tensor,
    log_sum_N: Tensor,
    targets_N: Tensor,
    here_N: Tensor,
    factor_N: Tensor,
    soft_cap: float = 0.0,
) -> None:
    """Make (softmax - one at the target) * factor of logits, in their memory.

    here: whether a target is among these rows of the table.
    soft_cap: c: these logits are c tanh(logit / c), and the gradient is that of what was capped.
    """
    if not logits_NV.is_cpu:
        return _to_gradients_on_a_device(logits_NV, log_sum_N, targets_N, here_N, factor_N, soft_cap)
    for rows in _pieces(logits_NV):
        if soft_cap:
            slope_RV = 1 - (logits_NV[rows].to(log_sum_N.dtype) / soft_cap).square_()
        grad_RV = _exp(logits_NV[rows].to(log_sum_N.dtype).sub_(log_sum_N[rows, None]))
        each_R = torch.arange(len(grad_RV), device=grad_RV.device)
        grad_RV[each_R, targets_N[rows]] -= here_N[rows].to(grad_RV.dtype)
        if soft_cap:
            grad_RV.mul_(slope_RV)
        logits_NV[rows] = grad_RV.mul_(factor_N[rows, None])


def _to_gradients_on_a_device(
    logits_NV: Tensor,
    log_sum_N: Tensor,
    targets_N: Tensor,
    here_N: Tensor,
    factor_N: Tensor,
    soft_cap: float = 0.0,
) -> None:
    """Do the same in fewer passes, and put what belongs to targets there at once: each time costs a sort."""

    def gradients(logits: Tensor, log_sum: Tensor, factor: Tensor, less: Tensor | None, out: Tensor) -> None:
        softmax = torch.sub(logits, log_sum).exp_()
        if less is not None:
            softmax -= less
        if soft_cap:
            softmax *= 1 - (logits.to(softmax.dtype) / soft_cap).square_()
        torch.mul(softmax, factor, out=out)

    each_N = torch.arange(len(logits_NV), device=logits_NV.device)
    at_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1)
    gradients(at_N.clone(), log_sum_N, factor_N, here_N.to(log_sum_N.dtype), at_N)
    for rows in _pieces(logits_NV):
        gradients(logits_NV[rows], log_sum_N[rows, None], factor_N[rows, None], None, logits_NV[rows])
    logits_NV[each_N, targets_N] = at_N


def _exp(x: Tensor) -> Tensor:
    """Return exp(x), in the memory of x.

    On a CPU by powers of two: torch's exp is MKL's, which takes four times as long on some
    processors. On a GPU torch would compile exp2 when it is first called, by NVRTC.
    """
    return x.mul_(LOG2_E).exp2_() if x.is_cpu else x.exp_()


def _pieces(logits_NV: Tensor) -> Iterator[slice]:
    """Yield positions some at a time.

    What is computed of them in fp32 stays in a cache, or is little on a device.
    """
    count, vocab = logits_NV.shape
    many = max(1, (LOGITS if logits_NV.is_cpu else LOGITS_ON_A_DEVICE) // vocab)
    return (slice(begin, begin + many) for begin in range(0, count, many))


@dataclass(frozen=True)
class Functions:
    """What layers are given to call: these as they are, or compiled."""

    norm: Callable[..., tuple[Tensor, Tensor, Tensor]] = norm
    norm_again: Callable[..., tuple[Tensor, Tensor]] = norm_again
    norm_backward: Callable[..., tuple[Tensor, Tensor]] = norm_backward
    gated: Callable[..., tuple[Tensor, Tensor | None]] = GatedProduct().forward
    gated_backward: Callable[..., tuple[Tensor, Tensor]] = GatedProduct().backward
    turned: Callable[..., Tensor] = turned
    log_sums: Callable[..., Tensor] = log_sums
    to_gradients: Callable[..., None] = to_gradients
    quantise: Quantise = quantise_in
    activation: Activation = SILU  # of `gated` and its backward
    keep_activated: bool = True  # activation(gate), for the backward

    def gated_by(self, activation: Activation) -> "Functions":
        """Return the functions of another activation. It is called as it is: only silu is compiled."""
        if activation == self.activation:
            return self
        product = GatedProduct(activation)
        return replace(
            self,
            gated=product.forward,
            gated_backward=product.backward,
            activation=activation,
            keep_activated=False,
        )


EAGER = Functions()

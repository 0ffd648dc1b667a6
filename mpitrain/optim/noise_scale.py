"""The gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1), of one step.

A step's gradients are summed over shards of its batch: data ranks, or their microbatches where each
is reduced apart. Shard i has n_i of the N targets, and the gradient g_i of its summed loss. If the
true gradient of a target is G, and the trace of its covariance S, then

    E |g_i|^2      =  n_i^2 |G|^2 + n_i S

and with g, the sum of all g_i, and Q, the sum of all n_i^2,

    E sum |g_i|^2  =  Q |G|^2 + N S
    E |g|^2        =  N^2 |G|^2 + N S

so |G|^2 = (|g|^2 - sum |g_i|^2) / (N^2 - Q) and S = (sum |g_i|^2 - Q |G|^2) / N are unbiased. Of k
equal shards they are those of the paper, with B_big = N and B_small = N / k.

Their ratio S / |G|^2 is the noise scale: the batch, in tokens, beyond which a larger one gains
little. Each is noisy, so that means over many steps are divided, not the steps' own ratios.
"""

from collections.abc import Iterable

import torch


def squares(grads: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the square of each gradient's norm, in fp64."""
    return [torch.linalg.vector_norm(grad).double().square() for grad in grads if grad.numel()]


def estimates(small: float, big: float, squared_targets: float, num_targets: int) -> dict[str, float]:
    """Return the estimates of a step; none if one shard has all targets.

    small: the squares of the gradients of all shards, summed. big: the square of their sum's norm.
    Both of gradients of summed losses. squared_targets: of the shards' targets, squares summed.
    """
    unshared = float(num_targets) ** 2 - squared_targets
    if unshared <= 0:
        return {}
    signal = (big - small) / unshared
    return {
        # estimate of the squared norm of the true gradient (run.noise_scale)
        "grad_signal": signal,
        # estimate of the trace of the covariance of a token's gradient. The noise scale in tokens is the
        # mean of this over many steps, by the mean of grad_signal
        "grad_noise": (small - squared_targets * signal) / num_targets,
    }

"""The gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162, appendix A.1), of one step.

A step's gradients are summed over shards of its batch: data ranks, or their microbatches where each is
reduced apart. With k shards of a batch of N tokens, and gradients of mean losses,

    |G_big|^2    of the whole batch
    |G_small|^2  of a shard, the mean over the k shards

    |G|^2  =  (N |G_big|^2 - N/k |G_small|^2) / (N - N/k)              estimates the true gradient's
    S      =  (|G_small|^2 - |G_big|^2) / (k/N - 1/N)                  the trace of a token's covariance

Their ratio S / |G|^2 is the noise scale: the batch, in tokens, beyond which a larger one gains little.
Each is unbiased and noisy, so that means over many steps are divided, not the steps' own ratios.
"""

from collections.abc import Iterable

import torch


def squares(grads: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the square of each gradient's norm, in fp64."""
    return [torch.linalg.vector_norm(grad).double().square() for grad in grads if grad.numel()]


def estimates(small: float, big: float, num_shards: int, num_tokens: int) -> dict[str, float]:
    """Return the estimates of a step.

    small: the squares of the gradients of all shards, summed. big: the square of their sum's norm.
    Both of gradients of summed losses, over num_tokens targets, which the shards share equally.
    """
    mean_big = big / num_tokens**2
    mean_small = small * num_shards / num_tokens**2
    return {
        # estimate of the squared norm of the true gradient (run.noise_scale)
        "grad_signal": (num_shards * mean_big - mean_small) / (num_shards - 1),
        # estimate of the trace of the covariance of a token's gradient. The noise scale in tokens is the
        # mean of this over many steps, by the mean of grad_signal
        "grad_noise": (mean_small - mean_big) * num_tokens / (num_shards - 1),
    }

"""GPT-2 with dropout in plain torch, and its masks in numpy: no code of the package is used.

Philox-4x32-10 (Salmon et al., SC 2011) of unsigned integers. Its key is of run, step, block and
site; its counter is (sequence, head, position, number // 4), and the word is number % 4, the number
being that of a channel, or of a key.
"""

import numpy as np
import torch
from oracle_decoders import linear, norm
from torch.nn import functional

EMBEDDING, ATTENTION, AFTER_ATTENTION, AFTER_FFN = range(4)
LOW = np.uint64(2**32 - 1)
HALF = np.uint64(32)


def philox(counter, key):
    """Return [4, ...] words of counters [4, ...], uint64 each."""
    x = [np.asarray(word, np.uint64) for word in counter]
    k = [np.asarray(word, np.uint64) for word in key]
    for _ in range(10):
        p, q = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [(q >> HALF) ^ x[1] ^ k[0], q & LOW, (p >> HALF) ^ x[3] ^ k[1], p & LOW]
        k = [(k[0] + np.uint64(0x9E3779B9)) & LOW, (k[1] + np.uint64(0xBB67AE85)) & LOW]
    return np.stack(np.broadcast_arrays(*x))


def mask(rate, seed, step, block, site, shape):
    """Return what is multiplied by, fp64. shape: [sequences, heads, positions, numbers]."""
    key = philox((step, 0, block, site), (seed, 0))[:2]
    at = np.meshgrid(*map(np.arange, shape), indexing="ij")
    words = philox((at[0], at[1], at[2], at[3] // 4), key)
    word = np.take_along_axis(words, at[3][None] % 4, 0)[0]
    return torch.from_numpy((word >= np.uint64(round(rate * 2**32))) / (1 - rate))


def loss(w, rows, has, step):
    """Return the mean cross-entropy of rows of tokens, with dropout in a step; step None: without.

    has: blocks, heads, eps, seed and the three rates.
    """

    def drop(x, rate, block, site):
        if step is None:
            return x
        shape = x.shape if x.ndim == 4 else (len(x), 1, *x.shape[1:])
        return x * mask(has[rate], has["seed"], step, block, site, shape).view_as(x)

    x = w["embedding.weight"][rows[:, :-1]] + w["embedding.positions"][: rows.shape[1] - 1]
    x = drop(x, "embedding", 0, EMBEDDING)
    for i in range(has["blocks"]):
        start = f"blocks.{i}."
        p = {name.removeprefix(start): value for name, value in w.items() if name.startswith(start)}
        h = norm(x, p, "attention.norm", has)
        q, k, v = (
            linear(h, p, f"attention.{n}").unflatten(-1, (has["heads"], -1)).transpose(1, 2) for n in "qkv"
        )
        length = q.shape[2]
        unseen = torch.ones(length, length, dtype=torch.bool).triu(1)
        shares = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(unseen, -torch.inf).softmax(-1)
        a = (drop(shares, "attention", i, ATTENTION) @ v).transpose(1, 2).flatten(-2)
        x = x + drop(linear(a, p, "attention.output"), "residual", i, AFTER_ATTENTION)
        h = functional.gelu(linear(norm(x, p, "ffn.norm", has), p, "ffn.up"), approximate="tanh")
        x = x + drop(linear(h, p, "ffn.down"), "residual", i, AFTER_FFN)
    logits = norm(x, w, "head.norm", has) @ w.get("head.weight", w["embedding.weight"]).T
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

"""Dropout whose masks are a function of where an element is, and of nothing else.

No generator has a state: a rank computes the mask of what it holds, as often as it is asked, and
any other rank computes the same. So masks don't depend on the layout, on recomputation or on a
restart, and none is kept for the backward.

    which dropout             key                           counter
    embedding, residual       (seed, step, block, site)     sequence, 0,    position, channel // 4
    attention probabilities   the same                      sequence, head, query,    key // 4

The 4 words of a counter are those of the channels, or keys, 4 n to 4 n + 3. A word below
rate * 2**32 drops.
Philox-4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 3.3.

B sequences of a microbatch, T positions, D channels, H heads, S keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from mpitrain.plan.declared.dropout_sites import ATTENTION, DROPPED, DROPPED_ON_A_DEVICE

WORD = 2**32 - 1
ROUNDS = 10


class DropoutDraw(NamedTuple):
    """Whose masks a microbatch has. sequences: its numbers in the batch of the step."""

    seed: int
    step: int
    sequences: range


def philox(counter: Sequence[Any], key: tuple[int, int]) -> list[Any]:
    """Return 4 words of 32 bits for a counter of 4 and a key of 2.

    counter: integers, or int64 tensors that broadcast. A product of two words has 64 bits: of
    int64, which wraps round, the shift brings the sign back and the mask takes it off.
    """
    a, b, c, d = counter
    for number in range(ROUNDS):
        first = a * 0xD2511F53
        second = c * 0xCD9E8D57
        a = (second >> 32 & WORD) ^ b ^ (key[0] + number * 0x9E3779B9 & WORD)
        c = (first >> 32 & WORD) ^ d ^ (key[1] + number * 0xBB67AE85 & WORD)
        b = second & WORD
        d = first & WORD
    return [a, b, c, d]


def key_of(draw: DropoutDraw, block: int, site: int) -> tuple[int, int]:
    """Return the key of one dropout of a step.

    site: which of its block (plan/declared/dropout_sites.py).
    """
    counter = draw.step & WORD, draw.step >> 32, block, site
    first, second, *_ = philox(counter, (draw.seed & WORD, draw.seed >> 32 & WORD))
    return first, second


def dropped(
    rate: float,
    key: tuple[int, int],
    around: Sequence[torch.Tensor | int],
    numbers: int | np.ndarray,
    device: torch.device,
) -> torch.Tensor:
    """Return which elements are dropped, bool [..., S].

    around: the first 3 words of the counter, which broadcast to [..., 1].
    numbers: of channels or keys, in ascending order; or how many, from 0 on.
    """
    blocks, places = _blocks(numbers)
    last = torch.arange(blocks, device=device) if isinstance(blocks, int) else _on(blocks, device)
    limit = round(rate * 2**32)
    lanes = [word < limit for word in philox((*around, last), key)]
    words = torch.stack(lanes, -1).flatten(-2)
    if isinstance(places, int):
        return words[..., :places]
    return words.index_select(-1, _on(places, device))


def _blocks(numbers: int | np.ndarray) -> tuple[int | np.ndarray, int | np.ndarray]:
    """Return the blocks of 4 that numbers are of, and their places among these; of an integer, all
    up to it.
    """
    if isinstance(numbers, int):
        return -(-numbers // 4), numbers
    blocks, place = np.unique(numbers // 4, return_inverse=True)
    return blocks, place * 4 + numbers % 4


def _range(numbers: range, device: torch.device) -> torch.Tensor:
    return torch.arange(numbers.start, numbers.stop, device=device)


def _on(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(numbers.astype(np.int64)).to(device)


def drop(
    x_BTD: torch.Tensor, rate: float, draw: DropoutDraw, block: int, site: int, positions: torch.Tensor
) -> torch.Tensor:
    """Return x without the elements that are dropped, the others divided by 1 - rate.

    It is its own adjoint. Masks are made of some positions at a time.
    positions: of this rank, [T] or [B, T], int64, on the device of x.
    """
    key = key_of(draw, block, site)
    sequences = _range(draw.sequences, x_BTD.device)[:, None, None]
    at_once = DROPPED_ON_A_DEVICE if x_BTD.is_cuda else DROPPED
    rows = max(1, at_once // (len(x_BTD) * x_BTD.shape[-1]))
    y_BTD = torch.empty_like(x_BTD)
    for begin in range(0, x_BTD.shape[1], rows):
        here = slice(begin, begin + rows)
        around = sequences, 0, positions[..., here, None]
        mask = dropped(rate, key, around, x_BTD.shape[-1], x_BTD.device)
        torch.mul(x_BTD[:, here], 1 / (1 - rate), out=y_BTD[:, here]).masked_fill_(mask, 0)
    return y_BTD


@dataclass(frozen=True)
class ProbabilityDropout:
    """Dropout of attention's probabilities, of some heads of a block.

    heads: their numbers among those of all ranks.
    draw: None: none is drawn yet.
    queries, keys: their positions; None: keys are the first of the sequence, queries the last of
    these.
    """

    rate: float
    block: int
    heads: range
    draw: DropoutDraw | None = None
    queries: np.ndarray | None = field(default=None, compare=False)
    keys: np.ndarray | None = field(default=None, compare=False)

    def between(self, queries: np.ndarray, keys: np.ndarray) -> "ProbabilityDropout":
        """Return that between some positions."""
        return replace(self, queries=queries, keys=keys)

    def dropped(
        self, rows: slice, num_queries: int, num_keys: int, seen: int, device: torch.device
    ) -> torch.Tensor:
        """Return which probabilities are dropped, bool [B, H, rows, seen].

        rows, seen: of the queries, and how many of the keys, from the first on.
        """
        sequences, heads = (_range(numbers, device) for numbers in (self.draw.sequences, self.heads))
        if self.queries is None:
            before = num_keys - num_queries
            queries = torch.arange(before + rows.start, before + rows.stop, device=device)
        else:
            queries = _on(self.queries[rows], device)
        around = sequences[:, None, None, None], heads[:, None, None], queries[:, None]
        keys = seen if self.keys is None else self.keys[:seen]
        return dropped(self.rate, key_of(self.draw, self.block, ATTENTION), around, keys, device)

    def without(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Drop from x, in its memory, and return it."""
        return x.mul_(1 / (1 - self.rate)).masked_fill_(mask, 0)

"""Rounding to bf16 up or down by chance, so that the mean of what is kept is what was to be kept.

With round-to-nearest a moment that changes by less than half a unit in the last place (2**-9 of
itself) doesn't change at all: with beta2 = 0.999 a second moment would stay for ever at whatever
the first large gradients made of it. Rounded up with the probability of the part that is cut off
(Gupta et al. 2015, arXiv:1502.02551, section 3), it follows. So are first moments and momenta, for
which nearest would do while beta is below 0.99.

Measured with AdamW on 2 blocks of width 64 and real text, against fp32 moments. lr 1e-3, beta2
0.999, 200 steps, one seed: losses of all roundings within 0.1 %; the weights end 0.9 % away (0.6 %
with first moments to nearest; 0.7 % with both, but then second moments are 1.2 % too large
together, by chance 0.1 %). lr 3e-3, beta2 0.95, 250 steps, where runs part: the mean of the last 50
losses is 2.1 and 0.4 % higher with two seeds (first moments to nearest: 2.7 and 0.0 %; both: 4.4
and -0.3 %); how far two fp32 runs part there wasn't measured.

The random bits are a pure function of (seed, number of the update, name of the parameter, place of
the element in the whole parameter): the same in every layout, for every shard and copy, on every
device, and after a restart. They are a hash of the place (lowbias32 by C. Wellons,
nullprogram.com/blog/2018/07/31), in plain tensor operations: the generator of initial weights
(parallel/zero/initial.py) runs on a CPU only, gives no element of a column without those beside it,
and is no faster there (1.8 ns against 1.1 for 32 bits).
"""

import hashlib
import struct

import torch

from mpitrain.plan.declared.parameters import Spec

MULTIPLIERS = 0x7FEB352D, 0x846CA68B
LOW = 0xFFFF  # what fp32 has and bf16 hasn't


def draw(seed: int, update: int, name: str, places: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each place, [N] int32. places: [N] int32, changed to them."""
    digest = hashlib.sha256(f"{seed}/{update}/{name}".encode()).digest()
    one, other = struct.unpack("<2i", digest[:8])
    x = places.bitwise_xor_(one)
    scratch = torch.empty_like(places)
    for bits, multiplier in zip((16, 15), MULTIPLIERS):
        _fold(x, bits, scratch)
        x.mul_(_wrapped(multiplier))
    x.add_(other)  # two updates are not the same numbers at other places
    return _fold(x, 16, scratch)


def places(spec: Spec, begin: int, end: int, device: torch.device) -> torch.Tensor:
    """Return where elements [begin, end) of a box are in the whole, by rows, modulo 2**32: [N] int32."""
    if spec.shape[1:] == spec.whole[1:]:
        return torch.arange(end - begin, dtype=torch.int32, device=device).add_(_wrapped(spec.place(begin)))
    width = spec.shape[-1]
    first = torch.arange(begin // width, -(-end // width), device=device).mul_(width)
    rows = spec.place(first).to(torch.int32)  # wraps
    columns = torch.arange(width, dtype=torch.int32, device=device)
    return (rows[:, None] + columns).flatten()[begin % width :][: end - begin]


def round_into(kept: torch.Tensor, x: torch.Tensor, chance: torch.Tensor) -> None:
    """Round `x` [N] to `kept` [N] of bf16. chance: [N] int32, of which the lowest 16 bits count; changed.

    The bits of a float, taken as an integer, grow with its size: those that are cut off carry into
    the rest as often as they should. Infinity stays, and what rounds up from the largest number is
    infinity.
    """
    chance.bitwise_and_(LOW).add_(x.float().view(torch.int32)).bitwise_and_(~LOW)
    kept.copy_(chance.view(torch.float32))


def _fold(x: torch.Tensor, bits: int, scratch: torch.Tensor) -> torch.Tensor:
    """x ^= x >> bits of unsigned numbers: torch shifts the sign in, which is masked out."""
    torch.bitwise_right_shift(x, bits, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - bits)) - 1))


def _wrapped(number: int) -> int:
    """Return the number modulo 2**32 as int32 has it."""
    return (number + 2**31) % 2**32 - 2**31

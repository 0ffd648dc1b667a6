"""Initial weights that know nothing of the layout.

Element i of a parameter is a pure function of (seed, name, i): a rank makes the elements it holds,
and they equal the same elements of the whole. Counter-based random numbers: Philox (Salmon et al.
2011), of which numpy guarantees the raw bits over versions.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from mpitrain.parallel.zero.inverse_normal import CHUNK, Coefficients, Rounded, exact, table
from mpitrain.plan.declared.parameters import Spec
from mpitrain.plan.division.buckets import BucketMap

# elements that one thread makes at once. Several make as many by each call of numpy, too: of shorter ones
# they wait for each other's turn with Python, and 16 are slower than one
PIECE = 2**18


class Uniform:
    """The stream of uniform numbers of a parameter."""

    def __init__(self, seed: int, name: str):
        key = np.frombuffer(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], np.uint64)
        self._bits = np.random.Philox(key=key)
        self._numbers = np.random.Generator(self._bits)
        self._state = self._bits.state  # with an empty buffer

    def fill(self, out: np.ndarray, begin: int) -> None:
        """Fill `out`, fp64, with the elements from `begin` on: the middles of 2^53 steps from 0 to 1.

        Generator.random gives the first 53 of the 64 bits of each, as Philox.random_raw would in
        more time.
        """
        self._state["state"]["counter"][0] = begin // 4  # each turn of Philox makes 4
        self._bits.state = self._state
        self._numbers.random(begin % 4)
        self._numbers.random(out=out)
        out += 2.0**-54


def normal(seed: int, name: str, begin: int, end: int, std: float) -> torch.Tensor:
    """Return elements [begin, end) of a normally distributed parameter in fp64: uniform numbers
    through the inverse distribution.
    """
    u = np.empty(end - begin)
    Uniform(seed, name).fill(u, begin)
    return torch.from_numpy(exact(u, std))


class InitialRange(NamedTuple):
    """Elements [begin, end) of a rank's box of a parameter, row by row, and where they go."""

    spec: Spec
    begin: int
    end: int
    out: torch.Tensor


def fresh(spec: Spec, begin: int, end: int, seed: int, out: torch.Tensor) -> None:
    """Fill `out` with the initial weights in elements [begin, end) of a rank's box of a parameter."""
    if spec.std == 0:
        out.fill_(spec.constant)
        return
    shared = table()
    for at in range(begin, end, PIECE):
        until = min(at + PIECE, end)
        _make([InitialRange(spec, at, until, out[at - begin : until - begin])], seed, shared)


def initialise(
    mapped: BucketMap, first: int, last: int, seed: int | None, out: torch.Tensor, threads: int = 1
) -> None:
    """Fill `out`, of zeros, with the initial weights in elements [first, last) of a bucket; what
    pads it stays 0.

    seed: None where others come: constants alone are filled in.

    Computed on the host by so many threads, in fp64, rounded to fp32 unless `out` has more, and
    from there to its dtype.
    """
    pieces = list(_pieces(mapped, first, last, out))
    if not out.is_meta and pieces and seed is not None:
        shared = table()
        threads = min(threads, len(pieces))
        if threads == 1:
            return _make(pieces, seed, shared)
        try:
            with ThreadPoolExecutor(threads) as pool:
                for done in [
                    pool.submit(_make, pieces[number::threads], seed, shared, PIECE)
                    for number in range(threads)
                ]:
                    done.result()
        except RuntimeError:  # so many threads can't be started
            _make(pieces, seed, shared)


def _pieces(mapped: BucketMap, first: int, last: int, out: torch.Tensor) -> Iterator[InitialRange]:
    """Fill in the constants, and yield what is left to do."""
    for spec, begin, end in mapped.within(first, last):
        start = mapped.starts[mapped.specs.index(spec)] - first
        if spec.std == 0:
            out[start + begin : start + end].fill_(spec.constant)
            continue
        for at in range(begin, end, PIECE):
            until = min(at + PIECE, end)
            yield InitialRange(spec, at, until, out[start + at : start + until])


def _make(pieces: list[InitialRange], seed: int, shared: Coefficients, chunk: int = CHUNK) -> None:
    """Make the elements of pieces that go to one tensor, in its own memory if it has what a host computes."""
    out = pieces[0].out
    dtype = torch.promote_types(out.dtype, torch.float32)
    made = None if out.is_cpu and out.dtype == dtype else torch.empty(PIECE, dtype=dtype)
    rounded = Rounded(shared, chunk)
    u = np.empty(chunk)
    for spec, begin, end, out in pieces:
        here = out if made is None else made[: end - begin]
        stream = Uniform(seed, spec.name)
        for at in range(begin, end, chunk):
            until = min(at + chunk, end)
            numbers = _uniform(stream, spec, at, until, u)
            part = here[at - begin : until - begin].numpy()
            if dtype == torch.float32:
                rounded(numbers, part, spec.std)
            else:
                part[:] = exact(numbers, spec.std)
        if made is not None:
            out.copy_(here)


def _uniform(stream: Uniform, spec: Spec, begin: int, end: int, u: np.ndarray) -> np.ndarray:
    """Return the numbers of elements [begin, end) of a box, in `u`."""
    filled = 0
    for first, length in spec.runs(begin, end):
        stream.fill(u[filled : filled + length], first)
        filled += length
    return u[:filled]

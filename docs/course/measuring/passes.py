"""Count the bytes that operations read and write, of functions as they are written and fused.

    python docs/course/measuring/passes.py

Prints a JSON object. `functions`: [function, number of operations, bytes read and written by them, the
same if each input is read once and each output written once]. `lines`: [walk, cache lines fetched].
`products`: [side of a tile, elements fetched by a product of two matrices].
"""

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROWS, WIDTH, HIDDEN, VOCAB = 1024, 128, 384, 256
HEADS, TIME, HEAD = 4, 512, 32
MATRIX = 32  # rows and columns of the matrices of the cache's model
LINE = 16  # fp32 numbers of a cache line of 64 bytes
CACHE = 512  # numbers that the cache's model holds


class Traffic(TorchDispatchMode):
    """Counts the operations that aren't views, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_operations = 0
        self.num_bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        inputs = _tensors((args, kwargs))
        outputs = _tensors(result)
        storages = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        is_view = all(tensor.untyped_storage().data_ptr() in storages for tensor in outputs)
        if not is_view or function._schema.is_mutable:
            self.num_operations += 1
            self.num_bytes += sum(tensor.nbytes for tensor in (*inputs, *outputs))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# ---------------------------------------------------------------- what is counted


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gate of a Llama's feed-forward."""
    return torch.nn.functional.silu(gate) * up


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm as it stands in the paper."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of features turn."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy by its formula."""
    shifted = logits - logits.amax(-1, keepdim=True)
    return shifted.exp().sum(-1).log() - shifted.gather(-1, targets[:, None])[:, 0]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention by its formula: scores and probabilities are whole matrices [T, T]."""
    scores = q @ k.mT * (1 / math.sqrt(HEAD))
    future = torch.ones(TIME, TIME, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same by torch's kernel, which keeps a tile of scores at a time."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def counted(function: Callable, *inputs: torch.Tensor) -> list:
    """Return name, operations, their bytes, and those of the inputs and the output alone."""
    with torch.no_grad(), Traffic() as traffic:
        output = function(*inputs)
    least = sum(tensor.nbytes for tensor in (*inputs, output))
    return [function.__name__, traffic.num_operations, traffic.num_bytes, least]


def functions() -> list[list]:
    q, k, v = torch.randn(3, 1, HEADS, TIME, HEAD)
    half = torch.randn(2, TIME, HEAD // 2)
    return [
        counted(gated, torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)),
        counted(norm, torch.randn(ROWS, WIDTH), torch.randn(WIDTH)),
        counted(rotated, q, *half),
        counted(loss, torch.randn(ROWS, VOCAB), torch.randint(VOCAB, (ROWS,))),
        counted(attention, q, k, v),
        counted(flash, q, k, v),
    ]


# ---------------------------------------------------------------- a cache, as a model


def fetched(addresses: Iterable[int]) -> int:
    """Return how many lines a cache fetches that drops the line which was used the longest time ago."""
    held: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for address in addresses:
        line = address // LINE
        if line in held:
            held.move_to_end(line)
            continue
        misses += 1
        held[line] = None
        if len(held) > CACHE // LINE:
            held.popitem(last=False)
    return misses


def walks() -> list[list]:
    """Every element of a matrix once: along its rows, and down its columns."""
    side = 4 * MATRIX
    along = (row * side + column for row in range(side) for column in range(side))
    down = (row * side + column for column in range(side) for row in range(side))
    return [["along rows", fetched(along)], ["down columns", fetched(down)]]


def product(tile: int) -> Iterator[int]:
    """Addresses of C += A B, tile by tile; MATRIX as the tile is the loop as it is written first."""
    blocks = range(0, MATRIX, tile)
    for top in blocks:
        for left in blocks:
            for depth in blocks:
                yield from _tile(top, left, depth, tile)


def _tile(top: int, left: int, depth: int, tile: int) -> Iterator[int]:
    whole = MATRIX * MATRIX
    for row in range(top, top + tile):
        for column in range(left, left + tile):
            yield 2 * whole + row * MATRIX + column
            for inner in range(depth, depth + tile):
                yield row * MATRIX + inner
                yield whole + inner * MATRIX + column


def products() -> list[list]:
    return [[tile, fetched(product(tile)) * LINE] for tile in (MATRIX, 16, 8, 4)]


def main() -> None:
    torch.manual_seed(1)
    print(json.dumps({"functions": functions(), "lines": walks(), "products": products()}))


if __name__ == "__main__":
    main()

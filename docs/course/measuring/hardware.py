"""Count what rounding loses, and the arithmetic intensity of operations.

    python docs/course/measuring/hardware.py

Prints a JSON object. `least_change`: by type, the largest power of 2 that is lost when it is added to 1.
`intensity`: FLOPs that torch counts over the bytes of inputs and output, in bf16. `ridge`: the peak over
the bandwidth of memory of an H100, by its machine file.
"""

import json

import torch
from torch.utils.flop_counter import FlopCounterMode

from mpitrain.plan.predict.step_time.machine import find_machine

WIDTH = 4096
OPERATIONS = {"square": (WIDTH, WIDTH), "thin": (8, WIDTH)}  # rows and columns of the left factor


def least_change(dtype: torch.dtype) -> float:
    """Return the largest power of 2 that is lost when it is added to 1."""
    one = torch.ones((), dtype=dtype)
    return max(2.0**-k for k in range(64) if one + 2.0**-k == one)


def intensity(rows: int, columns: int) -> float:
    """Return FLOPs a byte of a product with a square matrix; nothing is computed."""
    left = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    right = torch.empty(columns, columns, dtype=torch.bfloat16, device="meta")
    with FlopCounterMode(display=False) as flops:
        product = torch.mm(left, right)
    return flops.get_total_flops() / sum(tensor.nbytes for tensor in (left, right, product))


def main() -> None:
    machine = find_machine("h100-80gb")
    ridge = machine.products["bf16"].peak / machine.memory["bandwidth"].peak
    print(
        json.dumps(
            {
                "least_change": {
                    name: least_change(getattr(torch, name)) for name in ("bfloat16", "float16", "float32")
                },
                "intensity": {name: intensity(*shape) for name, shape in OPERATIONS.items()},
                "ridge": ridge,
            }
        )
    )


if __name__ == "__main__":
    main()

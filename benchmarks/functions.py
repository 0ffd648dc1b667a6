"""Operations between matrix products (run.compile), each function as it is and compiled, in microseconds on
one thread.

    python benchmarks/functions.py [--types bf16 fp32] [--tokens 256] [--width 384] [--heads 6]
        [--ffn 1024] [--vocab 4096]

The least of some rounds, forms in turns; shapes are those of the `reference` model. The first line
is what a call costs besides its
numbers: the backward of a norm of 16 of them, as it is, compiled, and with the look-up of
torch.compile instead of ours.
"""

import argparse
import time
from collections.abc import Callable

import torch

from mpitrain.kernels import functions
from mpitrain.kernels.compiled import compiled
from mpitrain.kernels.functions import EAGER
from mpitrain.kernels.precision import TYPES, wide

ROUNDS, CALLS = 7, 40


def least_us(forms: dict[str, Callable], arguments: tuple) -> dict[str, float]:
    """Return microseconds of a call of each form."""
    found = dict.fromkeys(forms, float("inf"))
    for _ in range(ROUNDS):
        for name, function in forms.items():
            function(*arguments)
            begin = time.perf_counter()
            for _ in range(CALLS):
                function(*arguments)
            found[name] = min(found[name], (time.perf_counter() - begin) / CALLS * 1e6)
    return found


def calls(dtype: torch.dtype, tokens: int, width: int, heads: int, ffn: int, vocab: int) -> dict[str, tuple]:
    """Return what each function is called with."""
    x = torch.randn(1, tokens, width).to(dtype)
    weight = torch.ones(width, dtype=dtype)
    table = torch.randn(tokens, width // heads // 2)
    _, unit, scale = EAGER.norm(x, weight, 1e-5)
    gate = torch.randn(1, tokens, ffn).to(dtype)
    logits = torch.randn(tokens, vocab).to(dtype)
    table = table.to(wide(dtype))
    ones = torch.ones(tokens, dtype=torch.bool)
    return {
        "norm": (x, weight, 1e-5),
        "norm_backward": (x, weight, unit, scale),
        "gated": (gate, gate),
        "gated_backward": (gate, gate, gate, None),
        "turned": (x.unflatten(-1, (heads, -1)).transpose(1, 2), table, table, 1),
        "log_sums": (logits,),
        "to_gradients": (logits, EAGER.log_sums(logits), torch.zeros(tokens, dtype=torch.long), ones, ones),
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", nargs="+", choices=list(TYPES), default=["bf16", "fp32"])
    for name, size in (("tokens", 256), ("width", 384), ("heads", 6), ("ffn", 1024), ("vocab", 4096)):
        parser.add_argument(f"--{name}", type=int, default=size)
    given = vars(parser.parse_args())
    types = given.pop("types")
    fused = compiled(deterministic=True)
    torch.set_num_threads(1)
    looked_up = torch.compile(functions.norm_backward, dynamic=False, fullgraph=True)
    few = torch.randn(1, 1, 16), torch.ones(16), torch.randn(1, 1, 16), torch.ones(1, 1, 1)
    of_call = least_us(
        {"as it is": EAGER.norm_backward, "compiled": fused.norm_backward, "torch's look-up": looked_up}, few
    )
    print("a call:", ", ".join(f"{name} {us:.1f}" for name, us in of_call.items()), "us")
    for kind in types:
        for name, arguments in calls(TYPES[kind], **given).items():
            us = least_us({"as it is": getattr(EAGER, name), "compiled": getattr(fused, name)}, arguments)
            print(f"{kind} {name:<15} {us['as it is']:7.1f} -> {us['compiled']:6.1f} us")


if __name__ == "__main__":
    main()

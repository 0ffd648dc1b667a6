"""Count what one training step on one rank computes and moves.

    python docs/course/measuring/one_step.py CONFIG [KEY=VALUE ...]

Prints a JSON object after what the run prints: `operations` of torch that aren't views, `bytes` that
they read and write, `flops` of products and of attention.
"""

import json
import sys
from typing import Any

from passes import Traffic

from mpitrain import api

# Products per pair of query and key, each 2 FLOPs a feature: scores and output; in the backward scores
# again, and four gradients.
ATTENTION = {"forward": 2, "backward": 5}


class Work(Traffic):
    """Counts floating-point operations, too: causal attention as half of its square."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.startswith("mkldnn::_linear"):
            x, weight = args[:2]
            self.flops += 2 * x.numel() * weight.shape[0]
        elif name.startswith(("aten::mm", "aten::addmm")):
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[1]
        elif "flash_attention" in name:
            self.flops += self._attention(args, "backward" in name)
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _attention(self, args: Any, backward: bool) -> int:
        q, k = args[1:3] if backward else args[:2]
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] // 2
        return 2 * ATTENTION["backward" if backward else "forward"] * pairs * q.shape[3]


def main() -> None:
    with api.open_run(*sys.argv[1:]) as run:
        steps = run.steps()
        next(steps)
        with Work() as work:
            next(steps)
        for _ in steps:
            pass
    print(json.dumps({"operations": work.num_operations, "bytes": work.num_bytes, "flops": work.flops}))


if __name__ == "__main__":
    main()

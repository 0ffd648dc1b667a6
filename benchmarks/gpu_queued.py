"""What a step queues on a GPU.

Each operation, how often, its bytes, and the least time that it can take there. An estimate, no
timing.

    python benchmarks/gpu_queued.py                           a step of llama3.2-1b, 2 x 4 x 2048
                                                              tokens, bf16, on this GPU
    python benchmarks/gpu_queued.py run.compile=true          any settings; the last of a key counts
    python tests/hardware/without_gpu/run.py --empty --gigabytes 150 python benchmarks/gpu_queued.py
        without a GPU

The least time is that of its bytes through memory or of its multiplications, whichever is longer,
by the figures below, or of a launch. What stands out and shouldn't be there, a copy of all
gradients or a pass that a product could save, is found by reading the list.
"""

import argparse
from collections import defaultdict
from functools import partial

import torch
from mpi4py import MPI
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from mpitrain.actor.actor import Actor
from mpitrain.actor.communicators import build_mesh
from mpitrain.actor.step_totals import Measure
from mpitrain.comm.base.world import NULL_REPORTER, World
from mpitrain.config import load
from mpitrain.kernels.compiled import Fused
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.settings.resolve import resolve
from mpitrain.training.machine.device_placement import place

# of an H200, by its data sheet and what products and copies reach
BYTES_S = 0.8 * 4.8e12
FLOPS = 0.75 * 989e12
LAUNCH_S = 3e-6
STEP = {
    "model.preset": "llama3.2-1b",
    "data.sequence": 2048,
    "batch.micro": 4,
    "batch.global": 8,
    "precision.compute": "bf16",
}
NOTHING_MOVES = (
    "view", "as_strided", "detach", "t.", "transpose", "slice", "select", "unsqueeze", "expand", "split",
    "alias", "empty", "new_empty",
    "permute", "squeeze", "_unsafe_view", "chunk", "unbind", "reshape", "lift", "set_", "unfold", "resize_",
)  # fmt: skip


class Queued(TorchDispatchMode):
    """Notes what is computed while it is entered."""

    def __init__(self):
        super().__init__()
        # by operation, shape and dtype: times, seconds, bytes
        self.rows = defaultdict(lambda: [0, 0.0, 0])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.__name__
        if not name.startswith(NOTHING_MOVES):
            inputs = tensors((args, kwargs))
            outputs = tensors(result)
            if name.startswith("index_add"):  # of the table only some rows
                inputs = inputs[1:]
                outputs = []
            elif name.startswith(("index_select", "embedding")):
                inputs = inputs[1:]
            self.note(name, inputs, outputs, flops(name, args))
        return result

    def note(
        self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], flops: float = 0.0
    ) -> None:
        if every := inputs + outputs:
            num_bytes = sum(x.nbytes for x in every)
            largest = max(every, key=lambda x: x.numel())
            row = self.rows[
                name, "x".join(map(str, largest.shape)), str(largest.dtype).removeprefix("torch.")
            ]
            row[0], row[1], row[2] = (
                row[0] + 1,
                row[1] + max(num_bytes / BYTES_S, flops / FLOPS, LAUNCH_S),
                row[2] + num_bytes,
            )

    def fused(self, called: Fused, name: str, *arguments):
        """Call a compiled function, which is one row."""
        with _disable_current_modes():
            result = called(*arguments)
        self.note(f"{name}, compiled", tensors(arguments), tensors(result))
        return result


class AsIfFinite(Measure):
    """Reads what a step reads, and lets the optimiser step whatever it is.

    Without a GPU there are no numbers.
    """

    def squares(self, grads) -> list[float]:
        super().squares(grads)
        return [1.0]

    def count(self, targets) -> int:
        super().count(targets)
        return 1


def tensors(x) -> list[torch.Tensor]:
    return [each for each in tree_flatten(x)[0] if isinstance(each, torch.Tensor) and each.is_cuda]


def flops(name: str, args: tuple) -> float:
    """Return the floating-point operations of a product or of causal attention."""
    if name.startswith(("mm", "bmm", "addmm")):
        a, b = [x for x in args if isinstance(x, torch.Tensor)][-2:]
        return 2.0 * a.numel() * b.shape[-1]
    if "flash_attention" in name:
        backward = "backward" in name
        q, k = args[backward : backward + 2]
        return q.numel() * k.shape[-2] * 2.0 * (2.5 if backward else 1.0)
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rows", type=int, default=40)
    given = parser.parse_args()
    settings = [*(f"{key}={value}" for key, value in STEP.items()), *given.settings, "run.device=cuda"]
    config = resolve(load(None, settings), 1, 256)
    plan = plan_of(config)
    device = place(plan, World(MPI.COMM_WORLD, NULL_REPORTER)).device
    mesh = build_mesh(plan, MPI.COMM_WORLD)
    actor = Actor(plan, mesh, device, measure=AsIfFinite())
    queued = Queued()
    microbatches = actor.cutter.cut(
        torch.randint(0, 256, (config.batch.global_, config.data.sequence + 1), device=device)
    )
    for step in (1, 2):
        actor.run_step(step, microbatches, 1e-4)
    call = Fused.__call__
    names = {id(function): name for name, function in vars(actor.site.functions).items()}
    Fused.__call__ = lambda called, *arguments: queued.fused(
        partial(call, called), names[id(called)], *arguments
    )
    with queued:
        actor.run_step(3, microbatches, 1e-4)
    mesh.free()
    num_tokens = config.batch.global_ * config.data.sequence
    rows = queued.rows
    times, seconds = (sum(row[i] for row in rows.values()) for i in (0, 1))
    print(f"{num_tokens} tokens: {times} operations, {seconds * 1e3:.1f} ms at least")
    for (name, shape, dtype), (count, seconds, num_bytes) in sorted(rows.items(), key=lambda row: -row[1][1])[
        : given.rows
    ]:
        print(f"{seconds * 1e3:9.2f} ms {count:6d} x {num_bytes / 1e9:9.3f} GB  {name} [{shape}] {dtype}")


if __name__ == "__main__":
    main()

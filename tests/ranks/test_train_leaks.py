"""Nothing of a step is left when it is over.

Of all memory that operations made, as much is alive after each step.
"""

import gc
from itertools import product

import pytest
from conftest import EVERY, LONG, agree

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1)]

KINDS = {
    "plain": (),
    "bf16": ("precision.compute=bf16",),
    "fp8": ("precision.compute=fp8",),
    "documents": ("data.documents=separate",),
    "experts": ("model.family=mixtral", "experts.count=4", "experts.active=2", "experts.width=16"),
    "segments": ("pipeline.schedule=seq1f1b",),
    "further tokens": ("model.mtp=2",),
    "muon": ("optimizer.name=muon",),
}
KEPT = (
    "memory.recompute=none",
    "memory.recompute=selective",
    "memory.recompute=full",
    "memory.offload=activations",
)
OTHERS = [kept for kept in KEPT if kept != KEPT[1]]
SIMILAR = "plain", "bf16", "fp8", "segments", "muon", "documents", "further tokens"  # leave what others leave
FEW = [pytest.param(kind, KEPT[1], "torch's", marks=[LONG] * (kind in SIMILAR)) for kind in KINDS] + [
    pytest.param("plain", kept, "ours", marks=[LONG] * ("offload" not in kept)) for kept in OTHERS
]
# whose rows no buffer fits
ALL = [case for case in product(KINDS, KEPT, ("ours", "torch's")) if case[:2] != ("experts", KEPT[3])]


def made_and_alive():
    """Return a mode that notes all memory that operations make while it is entered, and what tells
    how much of it is alive.
    """
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    made = {}

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            for x in tree_flatten(found)[0]:
                if hasattr(x, "untyped_storage"):
                    storage = x.untyped_storage()
                    made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            return found

    def alive():
        gc.collect()
        for key in [key for key, (storage, _) in made.items() if storage.expired()]:
            del made[key]
        return sum(num_bytes for _, num_bytes in made.values())

    return Noting(), alive


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("kind", "kept", "attention"), ALL if EVERY else FEW)
def test_as_much_memory_is_alive_after_each_step(world, monkeypatch, kind, kept, attention):
    import torch
    from training import resolved

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.kernels import attention_cpu_16bit, attention_cpu_fp32
    from mpitrain.model.families.catalog import plan_of

    if world.size > 1:
        pytest.skip("runs on 1 rank")
    if attention == "torch's":
        monkeypatch.setattr(attention_cpu_16bit, "fits", lambda q: False)
        monkeypatch.setattr(attention_cpu_fp32, "fits", lambda q, k: False)
    config = resolved(world, "parallel.dp=1", "batch.micro=2", kept, *KINDS[kind])
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    rows = torch.randint(0, 50, (config.batch.global_, 17), generator=torch.Generator().manual_seed(1))
    microbatches = actor.cutter.cut(rows, 7 if kind == "documents" else None)
    found = []
    noting, alive = made_and_alive()
    for step in (1, 2, 3):
        with noting:
            actor.run_step(step, microbatches, 1e-3)
        found.append(alive())
    mesh.free()
    agree(world, found[1] == found[2], f"bytes alive after each step: {found}")

"""Training on a GPU, whose ranks may share one.

The CPU's numbers, the same bits twice, the memory that was predicted, offloading.

Each test is a function of the device. On a CPU it runs with every other test, so that no line waits
for a GPU to be wrong; there it has to be exact. With one GPU, one rank and then two on it:

    mpirun -n 2 python -m pytest --only-mpi -m gpu -p no:cacheprovider tests/hardware/test_gpu_steps.py
        tests/hardware/test_comm_gpu.py
"""

import gc
import warnings
from itertools import product
from pathlib import Path

import pytest
from conftest import agree

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2), pytest.mark.few_ranks]

# AdamW makes a whole step of the sign of a gradient that is all rounding
PLAIN = "optimizer.name=sgd", "batch.micro=2"
EXPERTS = "model.family=mixtral", "experts.count=4", "experts.active=2", "experts.width=16"
LAYOUTS = (
    "dp=1", "dp=1 pipeline.schedule=seq1f1b", "dp=2", "dp=2 zero=3", "pp=2", "pp=2 pipeline.schedule=zbv",
    "tp=2", "tp=2 async_tp=true",
    "cp=2", "cp=2 context=ulysses", "dp=2 ep=2",
)  # fmt: skip
# losses, norms, weights of a tensor's largest: relative
PRECISIONS = {"fp32": (1e-5, 1e-4, 2e-3), "bf16": (1e-2, 5e-2, 3e-2)}
KINDS = {
    "fp32": (),
    "bf16": ("precision.compute=bf16",),
    "fp16": ("precision.compute=fp16", "model.tied=false"),
    "documents": ("data.documents=separate", "memory.recompute=selective"),
    "experts": EXPERTS,
    "muon": ("optimizer.name=muon", "optimizer.moments=bf16"),
}


def cases(few, first, second):
    """Return some cases for the CPU, and all of a product for a GPU."""
    every = product(first, second)
    return [("cpu", *each) for each in few] + [
        pytest.param("cuda", *each, marks=pytest.mark.gpu) for each in every
    ]


def on_devices(names, *cases_):
    """Decorate a test with its cases, (few, first, second) as above."""
    return pytest.mark.parametrize(("device", *names), cases(*cases_), indirect=["device"], ids=str)


@pytest.fixture
def device(request, world):
    """The device of this rank, told as `mpitrain run` tells it."""
    import torch

    if request.param == "cpu":
        yield torch.device("cpu")
        return
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from training import resolved

    from mpitrain.comm.base.world import NULL_REPORTER, World
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.training.machine.device_placement import place

    config = resolved(world, "run.device=cuda", f"parallel.dp={world.size}")
    yield place(plan_of(config), World(world, NULL_REPORTER)).device
    torch.use_deterministic_algorithms(False)


def config_of(world, layout, *settings):
    """Return the configuration of a layout; skip where it needs another number of ranks."""
    from training import resolved

    return resolved(
        world, *settings, *(word if "." in word else f"parallel.{word}" for word in layout.split())
    )


def exact(device):
    return device.type == "cpu"


@on_devices(
    ("layout", "precision"), [("dp=1", "fp32"), ("pp=2", "bf16"), ("dp=2 ep=2", "fp32")], LAYOUTS, PRECISIONS
)
def test_three_steps_are_those_of_the_cpu(world, device, layout, precision):
    from training import same, train

    config = config_of(
        world, layout, *PLAIN, *(EXPERTS if "ep=" in layout else ()), f"precision.compute={precision}"
    )
    expected = train(world, config)
    found = train(world, config, device=device)
    losses, norms, weights = PRECISIONS[precision]
    *steps, validation = zip(expected[0], found[0], strict=True)
    off = [max(abs(b[0] / a[0] - 1) / losses, abs(b[1] / a[1] - 1) / norms) for a, b in steps]
    off.append(abs(validation[1][0] / validation[0][0] - 1) / losses)
    off += [
        abs(found[1][name] - w).max() / max(abs(w).max() * weights, 1e-30) for name, w in expected[1].items()
    ]
    agree(world, max(off) <= 1, f"{max(off):.3g} of what is allowed: {found[0]} for {expected[0]}")
    agree(world, not exact(device) or same(found, expected), "not the same bits")


@on_devices(
    ("kind", "layout"),
    [("bf16", "dp=1"), ("experts", "dp=2")],
    KINDS,
    ["dp=1", "dp=2", "pp=2", "tp=2", "cp=2"],
)
def test_the_same_steps_are_the_same_bits(world, device, kind, layout):
    from training import same, train

    config = config_of(world, layout, "batch.micro=2", *KINDS[kind])
    first = train(world, config, device=device)
    second = train(world, config, device=device)
    agree(world, same(first, second), f"{first[0]} and {second[0]}")


def held_by_tensors():
    """Return the bytes of all tensors of this process, views of one memory once."""
    import torch

    gc.collect()
    tensors = (
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.Tensor) and each.layout == torch.strided
    )
    memories = (each.untyped_storage() for each in tensors)
    return sum(
        {memory.data_ptr(): memory.nbytes() for memory in memories if memory.device.type == "cpu"}.values()
    )


def held_by_the_gpu():
    """Return the bytes that torch has allocated on this rank's GPU."""
    import torch

    gc.collect()
    return torch.cuda.memory_allocated()


HELD = {"cpu": held_by_tensors, "cuda": held_by_the_gpu}


@on_devices(
    ("layout", "precision"),
    [("dp=1", "bf16"), ("dp=2 zero=3", "fp32")],
    ["dp=1", "dp=2 zero=1", "dp=2 zero=3", "pp=2", "tp=2"],
    PRECISIONS,
)
def test_memory_is_within_a_twentieth_of_what_was_predicted(world, device, layout, precision):
    """State, as the allocator counts it; and what microbatches leave behind, as it is counted in a step."""
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.actor.memory import measure
    from mpitrain.actor.memory_meter import Watch
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.predict.memory import predict

    wide = (
        "model.width=256",
        "model.heads=4",
        "model.kv_heads=4",
        "model.ffn=512",
        "data.sequence=64",
        "comm.bucket_mb=8",
    )
    config = config_of(world, layout, *wide, "batch.micro=2", f"precision.compute={precision}")
    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    before = HELD[device.type]()
    actor = Actor(plan, mesh, device)
    held = HELD[device.type]() - before
    expected = predict(plan, actor.shards_here, device.type == "cuda")[actor.pp.rank]
    rows = torch.randint(
        0, 256, (config.batch.global_, 65), generator=torch.Generator().manual_seed(1)
    ).chunk(config.parallel.dp)
    watch = Watch(actor.stages.values(), actor.site.constants())
    actor.run_step(1, actor.cutter.cut(rows[mesh["dp"].rank].to(device)), 1e-3, watch=watch)
    found = measure(actor, watch)
    mesh.free()
    state = (
        expected.on_device - expected.activations - expected.recomputed - expected.working - expected.messages
    )
    agree(world, abs(held / state - 1) < 0.05, f"{held} bytes allocated, {state} predicted")
    agree(world, abs(found.activations / expected.activations - 1) < 0.05, f"{found} for {expected}")


@on_devices(
    ("layout", "offload"), [("dp=1", "all"), ("pp=2", "activations")],
    ["dp=1", "dp=2 zero=1", "pp=2", "tp=2"],
    ["activations", "optimizer", "all"],
)  # fmt: skip
def test_offloading_changes_nothing_but_the_last_bits_of_an_update(world, device, layout, offload):
    from training import same, train

    settings = "batch.micro=2", "precision.compute=bf16", "memory.recompute=selective"
    expected = train(world, config_of(world, layout, *settings), device=device)
    hosted = []

    def look(actor):
        hosted.extend(piece.weight.device.type == "cpu" for piece in actor.gradients.pieces)
        hosted.append(all(stage.offload_store is not None for stage in actor.stages.values()))

    found = train(world, config_of(world, layout, *settings, f"memory.offload={offload}"), look, device)
    on_host = offload in ("optimizer", "all") or exact(device)
    agree(
        world,
        hosted[-1] == (offload != "optimizer") and all(each == on_host for each in hosted[:-1]),
        f"{hosted}",
    )
    if exact(device) or offload == "activations":
        agree(world, same(found, expected), f"{found[0]} for {expected[0]}")
    off = [abs(b[0] / a[0] - 1) for a, b in zip(expected[0], found[0])]
    agree(world, found[0][0][0] == expected[0][0][0] and max(off) < 1e-3, f"{found[0]} for {expected[0]}")


@pytest.mark.gpu
def test_within_a_microbatch_the_host_waits_for_the_gpu_once_a_layer_of_experts(world):
    """For how many rows each expert gets: what else the host knows it has to send without waiting."""
    import torch

    if world.size > 1 or not torch.cuda.is_available():
        pytest.skip("runs on 1 rank with a GPU")
    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    device = torch.device("cuda")
    plan = plan_of(config_of(world, "dp=1", *EXPERTS, "batch.micro=2"))
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, device)
    rows = torch.randint(0, 256, (plan.config.batch.global_, plan.config.data.sequence + 1), device=device)
    microbatches = actor.cutter.cut(rows)
    actor.run_step(1, microbatches, 1e-3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            actor.run_step(2, microbatches, 1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    mesh.free()
    rooms = {"model", "kernels", "parallel"}
    places = [
        f"{Path(each.filename).name}:{each.lineno}"
        for each in caught
        if "synchroniz" in str(each.message) and Path(each.filename).parent.name in rooms
    ]
    expected = len(microbatches) * plan.config.model.layers
    agree(world, len(places) == expected and len(set(places)) == 1, f"{places}")

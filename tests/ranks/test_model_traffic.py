"""What a layer declares to send is what its items start: each item, both ways, in order and to the byte.

Layer.traffic is read without torch, the items run: every kind of layer over every axis that it sends on.
"""

import sys

import numpy as np
import pytest
from conftest import agree
from launch import finished

SETTINGS = (
    "model.layers=2",
    "model.width=32",
    "model.heads=4",
    "model.ffn=48",
    "data.sequence=16",
    "batch.global=8",
    "batch.micro=2",
    "comm.timeout_s=200",
)
GROUPED = ("model.kv_heads=2",)
ROUTED = ("experts.count=8", "experts.active=2")
FAMILIES = {
    "llama": GROUPED,
    "gemma2": GROUPED,  # norms after
    "gpt2": (),  # learned positions, biases, no gate
    "olmo2": GROUPED,  # norms of all heads together
    "qwen3": (*GROUPED, "model.mtp=2"),
    "mixtral": (*GROUPED, *ROUTED),
    "gpt-oss": (*GROUPED, *ROUTED),  # sinks
    "deepseek-v3": (*ROUTED, "experts.groups=2", "experts.groups_active=2", "model.mtp=1"),
}
CONTEXT = [f"cp=2 context={kind}" for kind in ("ring", "zigzag", "gather", "ulysses")]
LAYOUTS = [
    "tp=2",
    "tp=2 sequence=false",
    "tp=2 async_tp=true",
    "tp=2 regather=true",
    "tp=2 regather=true cp=2 context=zigzag",
    *CONTEXT,
    "tp=4",
    "tp=4 async_tp=true precision.compute=fp64",
    "tp=2 sequence=false cp=2 context=gather",
    "tp=2 cp=2 context=ulysses",
    "tp=2 async_tp=true cp=2 context=zigzag",
]
OF_EXPERTS = [
    "dp=2 ep=2",
    "dp=2 etp=2 experts.wire=bf16",
    "cp=2 ep=2 experts.wire=fp8",
    "tp=2 dp=2 ep=2 etp=2 experts.balance=sequence",
    "tp=2 cp=2 ep=4 precision.compute=fp64",
    "dp=4 ep=4 comm.node_ranks=2",
]
SPARSE = [name for name, settings in FAMILIES.items() if ROUTED[0] in settings]
CASES = [
    (family, layout)
    for family in FAMILIES
    for layout in [*LAYOUTS, *(OF_EXPERTS if family in SPARSE else ())]
    if not (family in SPARSE and "sequence=false" in layout)  # refused, as are latents gathered again
    and not (family == "deepseek-v3" and "regather" in layout)
]


def plan_with(family, layout, num_ranks):
    from mpitrain import config as settings
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    words = [word if "." in word else f"parallel.{word}" for word in layout.split()]
    words += ["experts.buffer=8"] * ("ep=" in layout or "etp=" in layout)  # all rows in one round
    config = settings.load(None, (*SETTINGS, f"model.family={family}", *FAMILIES[family], *words))
    return plan_of(resolve(config, num_ranks, 256))


def declared(plan):
    """Return what each layer of the one stage declares, item by item."""
    (stage,) = plan.stages
    placed = [each for block in stage.blocks for each in block]
    return [traffic for each in placed for traffic in each.layer.traffic(plan.sizes)]


class InTurn:
    """Routes of which each token takes the next experts: all have equal loads."""

    def __init__(self, settings):
        self.settings = settings

    def chosen(self, name, positions):
        count = self.settings.count
        numbers = np.arange(2 * len(positions) * self.settings.active) % count
        return numbers.reshape(2, len(positions), -1)

    def record(self, name, positions, experts):
        raise AssertionError("they are replayed")


class Noted:
    """An item, and what it starts, in order: (operation, axis, bytes).

    num_handed: how often it has handed over weight gradients.
    """

    def __init__(self, item, axes):
        self.item = item
        self.axes = [axis for axis in axes.values() if axis.size > 1]
        self.started = {"forward": [], "backward": []}
        self.num_handed = 0

    def forward(self, x, context):
        return (yield from self._noted(self.item.forward(x, context), "forward"))

    def backward(self, saved, grad, later):
        def counted(gradients):
            self.num_handed += 1
            later(gradients)

        return (yield from self._noted(self.item.backward(saved, grad, counted), "backward"))

    def _noted(self, walk, way):
        result = None
        while True:
            for axis in self.axes:
                axis.account.log = _Log(axis.name, self.started[way])
            try:
                pending = walk.send(result)
            except StopIteration as end:
                return end.value
            finally:
                for axis in self.axes:
                    axis.account.log = None
            result = yield pending


class _Log(list):
    """Takes what is started on one axis into the list of all."""

    def __init__(self, name, every):
        super().__init__()
        self.name = name
        self.every = every

    def append(self, entry):
        operation, num_bytes = entry
        self.every.append((operation, self.name, num_bytes))


def noted(items, axes):
    """Replace items that do something themselves by noted ones; return these."""
    from mpitrain.parallel.walk import Residual

    found = []
    for place, item in enumerate(items):
        if isinstance(item, Residual):
            found += noted(item.items, axes)
        else:
            items[place] = Noted(item, axes)
            found.append(items[place])
    return found


def compared(started, hierarchical):
    """Return operations as they are compared: how many rows cross between nodes is only expected."""
    return [
        (operation, axis, 0 if hierarchical and operation == "all_to_all_v" else num_bytes)
        for operation, axis, num_bytes in started
    ]


@pytest.mark.few_cases(4)
@pytest.mark.mpi
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_items_start_what_their_layer_declares(world, family, layout):
    import torch

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.parallel.microbatch import Context
    from mpitrain.parallel.walk import backward, forward, run

    needed = np.prod([int(word[3:]) for word in layout.split() if word[:3] in ("tp=", "cp=", "dp=")])
    if world.size != needed:
        pytest.skip(f"runs on {needed} ranks")
    plan = plan_with(family, layout, world.size)
    mesh = build_mesh(plan, world)
    actor = Actor(plan, mesh, torch.device("cpu"))
    blocks = actor.stages[0].blocks
    items = [each for block in blocks for each in noted(block, mesh.axes)]
    rows = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(mesh["dp"].rank))
    microbatch, *_ = actor.cutter.cut(rows)  # the rest of the step's are empty
    context = Context(microbatch, routes=InTurn(plan.config.experts))
    x = None
    saved = []
    for block in blocks:
        x, kept = run(forward(block, x, context))
        saved.append(kept)
    grad = None
    for block in reversed(blocks):
        grad = run(backward(block, saved.pop(), grad))
    mesh.progress.drain()
    mesh.free()
    hierarchical = "node_ranks" in layout
    expected = declared(plan)
    wrong = [f"{len(items)} items, declared {len(expected)}"] if len(items) != len(expected) else []
    for number, (item, traffic) in enumerate(zip(items, expected)):
        for way in ("forward", "backward"):
            found, said = (
                compared(each, hierarchical) for each in (item.started[way], getattr(traffic, way))
            )
            wrong += [f"item {number}, {way}: {found}, declared {said}"] if found != said else []
        wrong += [f"item {number}: weights"] if traffic.has_weights != (item.num_handed > 0) else []
    agree(world, not wrong, f"{wrong[:3]}")


def test_every_axis_that_carries_activations_is_among_the_cases():
    """And every operation that a layer can declare on it."""
    found = set()
    for family, layout in CASES:
        degrees = [int(word[3:]) for word in layout.split() if word[:3] in ("tp=", "cp=", "dp=")]
        for traffic in declared(plan_with(family, layout, int(np.prod(degrees)))):
            found |= {(each.axis, each.operation) for each in (*traffic.forward, *traffic.backward)}
    sums = {("tp", name) for name in ("all_reduce", "all_gather", "reduce_scatter", "shift")}
    over_cp = {("cp", name) for name in ("shift", "all_gather", "reduce_scatter", "all_to_all")}
    rows = {(axis, "all_to_all_v") for axis in ("experts", "experts_near", "experts_far")}
    assert found == sums | over_cp | rows | {("tokens", "all_reduce"), ("experts", "all_gather")}


def test_what_a_layer_sends_is_read_without_torch():
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/support', 'tests/oracles', 'tests/ranks']\n"
        "import test_model_traffic as t\n"
        "plan = t.plan_with('deepseek-v3', 'tp=2 cp=2 ep=4', 4)\n"
        "assert sum(each.num_bytes for traffic in t.declared(plan) for each in traffic.forward) > 0\n"
        "print('torch' in sys.modules)"
    )
    run = finished([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n", run.stdout + run.stderr


def test_a_layer_of_somebody_else_that_declares_nothing_is_named():
    """A run doesn't need it; what tells of messages before a run does."""
    from types import SimpleNamespace

    from mpitrain.actor.rehearsal import _declared_by
    from mpitrain.errors import ConfigError

    class Older:
        pass

    plan = SimpleNamespace(sizes=7)
    with pytest.raises(ConfigError, match=r"Older declares no traffic\(sizes\), .*define it"):
        _declared_by(Older(), plan)
    assert _declared_by(SimpleNamespace(traffic=lambda sizes: (sizes,)), plan) == (7,)

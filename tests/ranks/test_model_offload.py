"""Offloading on a device that is late (tests/support/late_device.py).

Right numbers, and little memory, whenever copies happen.

MPITRAIN_EFFORT=1000 plays as many orders of events.
"""

from collections import deque
from types import SimpleNamespace

import pytest
from conftest import EVERY, agree, but_for
from effort import numbers

SEEDS = numbers(range(42), 1000)
LENGTHS = 64, 96, 200
# of microbatches' walks; + in turns
ORDERS = "F0 B0 F1 B1 F2 B2", "F0 F1 F2 B0 B1 B2", "F0 F1+B0 F2+B1 B2"
PER_BLOCK = 2 * sum(LENGTHS)  # numbers that a block keeps, its input included
# of them on the device: two blocks leaving, two there again, and what is computed
MOST = 4 * PER_BLOCK + 3 * max(LENGTHS)


class Play:
    """Forwards and backwards of a stage's microbatches.

    What a block keeps is numbers that are looked at when the backward has them.
    """

    def __init__(self, seed, num_blocks):
        import numpy as np
        import torch
        from late_device import Device

        from mpitrain.model.offload import OffloadStore

        self.torch = torch
        self.random = np.random.default_rng([seed, 1])
        self.device = Device(seed)
        self.num_blocks = num_blocks
        self.order = ORDERS[seed % len(ORDERS)]
        self.wrong = []
        self.constant = self.device.put(torch.ones(8))
        self.offload_store = OffloadStore(self.device, [self.constant])
        self.kept = {}

    def run(self):
        for together in self.order.split():
            walks = deque(
                (self.forward if walk[0] == "F" else self.backward)(int(walk[1]))
                for walk in together.split("+")
            )
            while walks:  # in turns, block by block
                walk = walks.popleft()
                if next(walk, None) is not None:
                    walks.append(walk)
        self.device.finish()
        return self

    def forward(self, m):
        x = self.made(LENGTHS[0])
        for block in range(self.num_blocks):
            put = self.offload_store.away(m, block, False, []).put
            seed = self.torch.tensor(7)
            assert put(seed) is seed and put(self.constant) is self.constant
            self.kept[m, block] = [self.keep(put, *x)]  # the block before has kept it, too
            for length in (*LENGTHS, *LENGTHS[1:]):
                self.scratch()
                self.kept[m, block].append(self.keep(put, *self.made(length)))
            x = self.made(LENGTHS[0])
            self.kept[m, block].append(self.keep(put, *x))
            self.kept[m, block].append(self.keep(put, x[0].view(2, -1).t(), x[1].view(2, -1).t()))
            yield block

    def backward(self, m):
        from mpitrain.model.offload import opened

        for block in reversed(range(self.num_blocks)):
            self.offload_store.fetch(m, block)
            kept = self.kept.pop((m, block))
            for number in self.random.permutation(len(kept)):
                part, expected = kept[number]
                kept[number] = None
                self.scratch()
                if self.random.random() < 0.8:  # else it is dropped unseen
                    self.look(opened(part), expected, f"microbatch {m}, block {block}, {number}")
            yield block
        self.offload_store.forget(m)

    def made(self, length):
        values = self.torch.from_numpy(self.random.random(length, "float32"))
        return self.device.put(values), values

    def keep(self, put, x, expected):
        return put(x), expected

    def scratch(self):
        """Compute with some memory and drop it."""
        self.made(int(self.random.choice(LENGTHS)))

    def look(self, x, expected, what):
        there = self.device.address(x)
        self.device.compute.run(lambda: self.torch.equal(there(), expected) or self.wrong.append(what))


def play(seed, num_blocks=4):
    return Play(seed, num_blocks).run()


def test_what_was_kept_comes_back_whenever_it_travels():
    wrong = {seed: found for seed in SEEDS if (found := play(seed).wrong)}
    assert not wrong, f"{len(wrong)} of {len(SEEDS)} seeds: {dict(list(wrong.items())[:3])}"


def test_what_is_leaving_or_coming_is_bounded_however_many_blocks_there_are():
    """Two blocks may be leaving, and two be there again; and what one computes with."""
    most = [max(play(seed, num_blocks).device.most for seed in SEEDS[:20]) for num_blocks in (4, 12)]
    assert max(most) <= MOST, f"{most}, {PER_BLOCK} a block"
    assert most[1] <= most[0] + max(LENGTHS), f"{most}"


def newest(event):
    """Return a Host.take that lends the buffer which came back last. event: says when it may be written."""

    def take(self, length, dtype):
        from mpitrain.kernels.streams import OVER

        free = self._free[length, dtype]
        buffer, read = free.pop() if free else (self.streams.on_host(length, dtype), OVER)
        return buffer, event(read)

    return take


def over(read):
    from mpitrain.kernels.streams import OVER

    return OVER


FAULTS = {
    "a block doesn't wait until it is there": ("OffloadedStorage.arrive", lambda self: None),
    "a buffer is written while it is read": ("Host.take", newest(over)),
    "memory is free before it is copied": (
        "OffloadedStorage.leave",
        lambda self: setattr(self, "_leaving", None),
    ),
    "the host is ahead": ("Host.begin", lambda self: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_order_is_found(monkeypatch, fault):
    """That is, the device is late enough."""
    from mpitrain.model import offload

    (name, method), faulty = FAULTS[fault][0].split("."), FAULTS[fault][1]
    monkeypatch.setattr(getattr(offload, name), method, faulty)
    plays = (play(seed, num_blocks=8) for seed in SEEDS)
    assert any(each.wrong or each.device.most > MOST for each in plays)


def test_which_buffer_is_used_again_does_not_matter(monkeypatch):
    from mpitrain.model import offload

    monkeypatch.setattr(offload.Host, "take", newest(lambda read: read))
    assert not [seed for seed in SEEDS if play(seed).wrong]


@pytest.mark.parametrize("queue", ["there", "back"])
def test_a_queue_that_does_not_wait_is_found(queue):
    plays = [Play(seed, 4) for seed in SEEDS]
    for each in plays:
        getattr(each.offload_store.host, queue).wait = lambda event: None
    assert any(each.run().wrong for each in plays)


# ---------------------------------------------------------------- whole models, and the optimiser


KINDS = {
    "dense": ("memory.recompute=selective",),
    "full": ("memory.recompute=full", "data.documents=separate"),
    "further": ("model.mtp=1", "model.family=qwen3"),
}
LAYOUTS = (
    "dp=1",
    "dp=1 pipeline.schedule=seq1f1b",
    "cp=2",
    "pp=2 pipeline.schedule=zbv",
    "tp=2",
    "dp=2 pipeline.schedule=dualpipev",
)


@pytest.mark.few_cases(2)
@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize("layout", but_for(LAYOUTS, ["cp=2", "tp=2"]))
@pytest.mark.parametrize("kind", KINDS)
def test_models_train_to_the_same_bits_with_copies_that_are_late(world, monkeypatch, kind, layout):
    from late_device import Eager
    from training import resolved, same, train

    from mpitrain.actor import stage
    from mpitrain.optim import offload

    keys = (
        *KINDS[kind],
        "batch.micro=2",
        *(word if "." in word else f"parallel.{word}" for word in layout.split()),
    )
    expected = train(world, resolved(world, *keys))
    devices = []
    for seed in range(3 if EVERY or kind == "dense" else 1):
        make = lambda device, seed=seed: devices.append(Eager(seed)) or devices[-1]  # noqa: E731
        monkeypatch.setattr(stage, "streams_of", make)
        monkeypatch.setattr(offload, "streams_of", make)
        monkeypatch.setattr(offload, "LOAD", 4096)
        found = train(world, resolved(world, *keys, "memory.offload=all"))
        agree(world, same(found, expected), f"{kind}, {layout}, seed {seed}")
    agree(
        world,
        devices and all(device.num_copies for device in devices),
        f"{[device.num_copies for device in devices]}",
    )


class Sums:
    """An optimiser that adds the gradients it finds in host memory when it is asked to."""

    def __init__(self, pieces):
        self.pieces = pieces

    def step(self, lr):
        for piece in self.pieces:
            piece.weight.add_(piece.grad)


def test_an_offloaded_optimiser_sees_the_gradients_of_its_step(monkeypatch):
    """The device writes the next ones into the same memory as soon as it may."""
    import torch
    from late_device import Device

    from mpitrain.optim import offload
    from mpitrain.parallel.zero.shards import ParameterShard

    monkeypatch.setattr(offload, "LOAD", 100)
    for seed in SEEDS:
        device = Device(seed)
        monkeypatch.setattr(offload, "streams_of", lambda _, device=device: device)
        grads = [device.put(torch.zeros(length)) for length in (30, 80, 60, 90)]
        pieces = [
            ParameterShard(SimpleNamespace(), 0, len(grad), torch.zeros(len(grad)), grad) for grad in grads
        ]
        optimizer = offload.Offloaded(pieces, torch.device("cpu"), Sums, whole=False)
        assert len(optimizer._loads) == 2
        for step in range(1, 5):
            for grad in grads:
                there = device.address(grad)
                device.compute.run(lambda there=there, step=step: there().fill_(step))
            optimizer.step(1.0)
        assert all((piece.weight == 1 + 2 + 3 + 4).all() for piece in pieces), f"seed {seed}"


def test_a_stream_of_a_gpu_waits_for_events_of_its_own_and_not_for_what_was_never_under_way():
    """As torch.cuda.Stream does, this one has its events wait: OVER is none of them."""
    from mpitrain.kernels.streams import OVER, _Stream

    waits = []
    stream = SimpleNamespace(wait_event=lambda event: event.wait(stream))
    queue = _Stream(lambda: stream)
    queue.wait(OVER)
    queue.wait(SimpleNamespace(wait=waits.append))
    assert waits == [stream]

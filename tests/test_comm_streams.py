"""Device buffers under a CUDA-aware MPI: nothing is handed to it before the work queued for the device is done.

No device is needed: host buffers play device buffers whose kernels end late, and everything is noted in its order.
"""

import numpy as np
import pytest
from conftest import agree

pytestmark = pytest.mark.mpi


class Stream:
    """Notes what is queued, when an event is recorded and seen, and what is posted: `bad` is what was posted too early."""

    def __init__(self, monkeypatch):
        from mpitrain.comm import device, messages

        self.queued = self.done = 0  # kernels
        self.bad, self.posted = [], 0
        monkeypatch.setattr(device, "on_device", lambda x: True)
        monkeypatch.setattr(device, "written", self.written)
        for name in ("copy", "sum_in_order"):
            monkeypatch.setattr(messages, name, self.kernel(getattr(messages, name)))
        for name in ("send", "receive"):
            monkeypatch.setattr(messages, name, self.post(name, getattr(messages, name)))

    def written(self, x):
        before, asked = self.queued, []

        def ready():
            asked.append(None)
            if len(asked) > 2:
                self.done = max(self.done, before)
            return len(asked) > 2

        return ready

    def kernel(self, function):
        def run(*arguments):
            self.queued += 1
            return function(*arguments)

        return run

    def post(self, name, function):
        def run(*arguments, **options):
            self.posted += 1
            if self.done < self.queued:
                self.bad.append(f"{name} after {self.done} of {self.queued} kernels")
            return function(*arguments, **options)

        return run


@pytest.mark.parametrize("length", [16, 40_000])
def test_everything_is_posted_after_what_was_queued_before_it(world, monkeypatch, length):
    from mpitrain.comm.collectives import all_gather, all_reduce, all_to_all, broadcast, reduce_scatter, shift
    from mpitrain.comm.grid import Grid
    from mpitrain.comm.links import Links
    from mpitrain.comm.mesh import Mesh

    mesh = Mesh(world, Grid({"dp": world.size}), spans={"links": ("dp",)}, transport="messages", timeout_s=30)
    for axis in mesh.axes.values():
        axis.device_aware = True
    axis, links = mesh["dp"], Links(mesh["links"], world.size, 1)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    x, stream, bad = np.ones(length * world.size), Stream(monkeypatch), {}
    starts = {
        "all_reduce": lambda: all_reduce(x, axis),
        "reduce_scatter": lambda: reduce_scatter(x, axis),
        "all_gather": lambda: all_gather(x[:length].copy(), axis, x),
        "all_to_all": lambda: all_to_all(x, axis),
        "broadcast": lambda: broadcast(x, axis),
        "shift": lambda: shift(x, axis),
        "send": lambda: links.send("F", right, 0, x, right),
        "receive": lambda: links.receive("F", world.rank, 0, x.copy(), left),
    }
    for name, start in starts.items():
        stream.queued += 1  # what makes the buffer
        pending = start()
        if name != "send":
            pending.wait()
        bad |= {name: list(stream.bad)} if stream.bad else {}
        stream.bad.clear()
    mesh.free()
    agree(world, not bad and (world.size == 1 or stream.posted), f"{bad}")

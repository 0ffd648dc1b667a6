"""The gradient buckets of one rank, and over which axes each is summed.

    bucket              of one stage: over the data axis
    tied embedding      its uses on this rank, then those of the rank with the other end of the model, then the data axis
    partial copies      norms with sequence parallelism, repeated key-value heads: over the tensor-parallel axis, then the data axis
    two copies          (DualPipe) the same stage on two ranks of the pipeline, then the data axis

Ranks start the operations of an axis in one order. When a sum over other axes is complete differs from rank to rank; so what follows
it on the data axis is started by `wait`, in the order of the stages.
"""

from mpitrain.comm.collectives import all_reduce
from mpitrain.comm.mesh import Axis, Mesh
from mpitrain.comm.progress import Pending
from mpitrain.model.parameters import Parameter
from mpitrain.schedules.table import Table
from mpitrain.slicing import EMBEDDING
from mpitrain.stage import Bucket, Stage


class Gradients:
    """All gradients of a rank. `counted`: the parameters that count for the norm and are saved here; each of the model's once."""

    def __init__(self, stages: dict[int, Stage], table: Table, mesh: Mesh):
        self.stages, self.table, self.mesh, self.data = stages, table, mesh, mesh["data"]
        self._uses = [grad for stage in stages.values() for bucket in stage.buckets if bucket.tied for grad in bucket.grads]
        self.counted = self._counted(mesh["pp"].rank)
        self._begin()

    def start(self, stage: int, bucket: int) -> None:
        """Start reducing a bucket to which everything of this step has been added."""
        found = self.stages[stage].buckets[bucket]
        if found.tied:
            self._uses_done += len(found.grads)
            if self._uses_done == len(self._uses):
                self._start_tied()
        elif not self._first_over(found):
            self._reducing.append(all_reduce(found.grads[0], self.data))

    def wait(self) -> None:
        """Wait for everything that was started, and begin anew."""
        if self._tying is not None:
            self._reducing.append(all_reduce(self._tying.wait(), self.data))
        self._start_others()
        for pending in self._reducing:
            pending.wait()
        self._begin()

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        grads = [bucket.grads[0] for stage in self.stages.values() for bucket in stage.buckets if not bucket.tied]
        for grad in grads + self._uses[:1]:
            grad.mul_(factor)

    def _begin(self) -> None:
        self._uses_done = 0
        self._reducing: list[Pending] = []
        self._tying: Pending | None = None

    def _start_tied(self) -> None:
        first, *others = self._uses
        for other in others:
            first += other
        if self.mesh["tied"].size > 1:
            self._tying = all_reduce(first, self.mesh["tied"])
        else:
            self._reducing.append(all_reduce(first, self.data))

    def _first_over(self, bucket: Bucket) -> list[Axis]:
        """Return the axes a bucket is summed over before the data axis."""
        names = [bucket.over] * (bucket.over is not None) + ["mirror"] * (self.table.copies == 2)
        return [self.mesh[name] for name in names]

    def _start_others(self) -> None:
        """Sum what goes over other axes first, and start its sum over the data axis."""
        numbers = sorted(self.stages, key=lambda number: number % self.table.depth)
        buckets = [bucket for number in numbers for bucket in self.stages[number].buckets if not bucket.tied]
        started = []
        for bucket in buckets:
            if axes := self._first_over(bucket):
                started.append((all_reduce(bucket.grads[0], axes[0]), axes[1:]))
        for pending, axes in started:
            for axis in axes:
                pending = all_reduce(pending.wait(), axis)
            self._reducing.append(all_reduce(pending.wait(), self.data))

    def _counted(self, rank: int) -> list[Parameter]:
        owns_embedding = rank == self.table.rank_of[0]
        owned = [(stage, p) for number, stage in self.stages.items() if number < self.table.depth for p in stage.owned if p.spec.copy == 0]
        return [p for stage, p in owned if owns_embedding or not (stage.config.model.tied and p.name == EMBEDDING)]

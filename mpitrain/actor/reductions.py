"""The gradients of one rank: which axes each bucket is summed over, and in which order.

    bucket              of one stage: over the data axis, which is shard x replicate: a reduce-scatter, and an all-reduce of the shard
    tied embedding      its uses on this rank, then those of the rank with the other end of the model, then the data axis
    partial copies      norms with sequence parallelism, repeated key-value heads: over the tensor-parallel axis, then the data axis
    two copies          (DualPipe) the same stage on two ranks of the pipeline, then the data axis

Ranks start the operations of an axis in one order. When a sum over other axes is complete differs from rank to rank; so what follows
it on the data axis is started by `wait`, in the order of the stages.
"""

from collections import deque
from collections.abc import Sequence

from mpitrain.actor.slots import added_to, completed_by, group_of
from mpitrain.actor.stage_state import Bucket, StageState
from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_reduce
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.progress import Pending
from mpitrain.parallel.zero.shards import Gradient, Piece, Sharding, pieces_of
from mpitrain.schedules.actions import Action
from mpitrain.schedules.table import Table


class Gradients:
    """All gradients of a rank. `pieces`: what this rank updates.

    counted: those of them that count for the norm and are saved here; each element of the model is counted by one rank.
    """

    def __init__(self, stages: dict[int, StageState], table: Table, program: Sequence[Action], mesh: Mesh, sharding: Sharding):
        self.stages, self.table, self.mesh, self._sharding = stages, table, mesh, sharding
        self._completed = completed_by(program, stages, table)
        tied = [bucket for stage in stages.values() for bucket in stage.buckets if bucket.tied]
        self._uses = [gradient for bucket in tied for gradient in bucket.gradients]
        owned = [(number, bucket) for number, stage in stages.items() for bucket in stage.buckets if bucket.owned]
        found = [(number, bucket, piece) for number, bucket in owned for piece in self._pieces_of(bucket)]
        self.pieces = [piece for _, _, piece in found]
        self.counted = [piece for number, bucket, piece in found if self._counts(number, bucket, piece)]
        self._begin()

    def _counts(self, number: int, bucket: Bucket, piece: Piece) -> bool:
        """Tell whether this rank, of those that have the same elements of a stage's bucket, is the one that counts them."""
        owns_embedding = self.mesh["pp"].rank == self.table.rank_of[0]
        return number < self.table.depth and piece.spec.copy == 0 and (owns_embedding or not bucket.tied)

    def _pieces_of(self, bucket: Bucket) -> list[Piece]:
        """All uses of a tied embedding are summed in the first one of this rank."""
        gradient = self._uses[0] if bucket.tied else bucket.gradients[0]
        return list(pieces_of(bucket.weights, gradient, self._sharding.rank))

    # ------------------------------------------------------------ a step

    def hold(self, action: Action) -> None:
        """Have buffers for what a backward, or one part of it, adds to."""
        group = group_of(self.table, action.index)
        for gradient in added_to(action, self.stages):
            self._make_room(gradient, group)
            gradient.hold(group)

    def added(self, action: Action) -> None:
        """Take note that a backward, or one part of it, has added to its gradients."""
        for gradient, group in self._completed.get(action, ()):
            gradient.complete(group)

    def start(self, stage: int, bucket: int, microbatch: int | None = None) -> None:
        """Start reducing a bucket to which everything of this step has been added, or of this microbatch.

        What goes over other axes first is reduced once a step.
        """
        found = self.stages[stage].buckets[bucket]
        last = microbatch in (None, self.table.num_microbatches - self.table.segments)  # segments of a sequence descend
        if (found.tied or self._first_over(found)) and not last:
            return
        for gradient in found.gradients:
            gradient.finish()
        if found.tied:
            self._uses_done += len(found.gradients)
            if self._uses_done == len(self._uses):
                self._start_tied()
        elif not self._first_over(found):
            self._start_over_data(found.gradients[0], last)
        self._advance()

    def wait(self) -> None:
        """Wait for everything that was started, and begin anew."""
        if self._tying is not None:
            self._tying.wait()
            self._start_over_data(self._uses[0])
        self._start_others()
        for reduction in self._reducing:
            reduction.start_summing()
        for reduction in self._reducing:
            reduction.wait()
        if self._sharding.tree:
            self._finish_tied()
        self._begin()

    def scale(self, factor: float) -> None:
        """Multiply the gradients of all pieces."""
        for piece in self.pieces:
            piece.grad.mul_(factor)

    # ------------------------------------------------------------ over the data axis

    def _begin(self) -> None:
        self._uses_done = 0
        self._tying: Pending | None = None
        self._reducing: deque[_Reduction] = deque()

    def _start_over_data(self, gradient: Gradient, last: bool = True) -> None:
        self._reducing.append(_Reduction(gradient, self._sharding, last))
        self._advance()

    def _advance(self) -> None:
        """Let every reduction go on whose turn it is."""
        for reduction in self._reducing:
            if not reduction.scattered:
                break
            reduction.start_summing()

    def _make_room(self, gradient: Gradient, group: int) -> None:
        """Wait until a buffer of this length comes back, if all are lent out.

        Only then: ranks that read each other's buffers must have taken the same ones, whenever each sees a reduction complete.
        """
        while not gradient.can_hold(group):
            self._reducing.popleft().wait()

    # ------------------------------------------------------------ over other axes first

    def _start_tied(self) -> None:
        if self._sharding.tree:  # sums over microbatches and ranks are one tree: uses are added after it
            for use in self._uses:
                self._start_over_data(use)
            return
        first, *others = self._uses
        for other in others:
            first.whole += other.whole
            self._give_back(other)
        if self.mesh["tied"].size > 1:
            self._tying = all_reduce(first.whole, self.mesh["tied"])
        else:
            self._start_over_data(first)

    def _finish_tied(self) -> None:
        for use in self._uses[1:]:
            self._uses[0].shard += use.shard
        if self._uses:
            all_reduce(self._uses[0].shard, self.mesh["tied"]).wait()

    def _give_back(self, gradient: Gradient) -> None:
        if self._sharding.stage >= 2:
            self._sharding.gradients.give_back(gradient.whole)
            gradient.drop()

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
                started.append((bucket.gradients[0], all_reduce(bucket.gradients[0].whole, axes[0]), axes[1:]))
        for gradient, pending, axes in started:
            for axis in axes:
                pending = all_reduce(pending.wait(), axis)
            pending.wait()
            self._start_over_data(gradient)


class _Reduction:
    """The sum of one bucket over the data axis, under way: over `shard`, then, of the shard, over `replicate`.

    The second is started when the first is complete, in the order in which all ranks started the first. last: nothing more will be
    added to the bucket in this step; otherwise its shard waits for the rest.
    """

    def __init__(self, gradient: Gradient, sharding: Sharding, last: bool):
        self._gradient, self._sharding, self._last = gradient, sharding, last
        self._scattering, self._lent = gradient.reduce()
        self._summing: Pending | None = None
        self._started = False

    @property
    def scattered(self) -> bool:
        """Whether the first is complete."""
        return self._scattering.done

    def start_summing(self) -> None:
        """Start the second sum, if it isn't started; wait for the first."""
        if self._started:
            return
        self._started = True
        reduced = self._scattering.wait()
        if self._sharding.each:
            self._gradient.take(reduced)
            reduced = self._gradient.shard
        if self._last:
            self._summing = all_reduce(reduced, self._sharding.replicate)

    def wait(self) -> None:
        """Wait for both, and give the buffer back."""
        self.start_summing()
        if self._summing is not None:
            reduced = self._summing.wait()
            if not self._sharding.each:
                self._gradient.take(reduced)
        if self._lent is not None:
            self._sharding.gradients.give_back(self._lent)

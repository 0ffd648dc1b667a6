"""Data parallelism: the gradients of one rank, summed over ranks as its program says.

    REDUCE  over the data axis, which is shard x replicate of the bucket's domain: a reduce-scatter,
            and an all-reduce of the shard
    SUM     over another axis first, in place:
               partial copies  norms with sequence parallelism, repeated key-value heads: the
                               tensor-parallel axis
               two copies      (DualPipe) the same stage on two ranks of the pipeline
               tied embedding  its uses on this rank are added, then those of the rank with the
                               other end of the model
    NORM       waits for everything

Sums over microbatches and data ranks can be one tree; then uses of a tied embedding are summed
after it. Ranks start an axis's operations in one order (proof: schedules/proof/bucket_rules.py).
"""

from collections import deque
from collections.abc import Sequence

import torch

from mpitrain.actor.stage_state import BucketState, StageState
from mpitrain.actor.step_work import Work
from mpitrain.comm.collectives import all_reduce, all_to_all, reduce_scatter
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.progress import Pending
from mpitrain.optim import noise_scale
from mpitrain.parallel.zero.shards import Gradient, ParameterShard, pieces_of
from mpitrain.parallel.zero.tree_accumulation import TreeGradient
from mpitrain.plan.declared.parameters import Spec
from mpitrain.plan.division.batch_division import SubtreeSums
from mpitrain.plan.division.domains import DENSE
from mpitrain.plan.division.gradient_accumulation import added_to, completed_by, summed_in
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.rounded_copies import TOGETHER
from mpitrain.schedules.actions import Action


class Gradients:
    """All gradients of a rank. `pieces`: what this rank updates.

    counted: those of them that count for the norm and are saved here; each element of the model is
    counted by one rank.
    replicas: by domain, those that are counted here or by another rank of its axis `replicate`.
    waits: see Needed in plan/predict/pool_sizes.py.
    compared: pieces whose gradients of shards of a batch are compared with the whole
    (optim/noise_scale.py). squares_of_shards: of this rank's gradients of the step,
    before they are summed.
    """

    def __init__(
        self,
        plan: Plan,
        stages: dict[int, StageState],
        program: Sequence[Action],
        mesh: Mesh,
        waits: Sequence[int],
    ):
        self.stages = stages
        self.table = table = plan.table
        self.mesh = mesh
        self._waits = waits
        self._run = run = plan.run_of(mesh["dp"].rank)  # what is added up here
        self._completed = completed_by(program, stages, table, run)
        placed_pieces = [
            (number, bucket, piece)
            for number, stage in stages.items()
            for bucket in stage.buckets
            if bucket.owned
            for piece in pieces_of(bucket.weights, bucket.gradients[0])
        ]
        self.pieces = [piece for _, _, piece in placed_pieces]
        self.most_bytes = 0  # of rounded copies that are sent, at once
        self.replicas: dict[str, list[ParameterShard]] = {}
        self.counted: list[ParameterShard] = []
        self.compared: list[ParameterShard] = []
        self.squares_of_shards: list[torch.Tensor] = []
        self._noise = plan.config.run.noise_scale
        for number, bucket, piece in placed_pieces:
            if self._counts_or_replicates(number, bucket, piece.spec):
                self.replicas.setdefault(bucket.plan.domain, []).append(piece)
                if bucket.gradients[0].zero_group.first:
                    self.counted.append(piece)
                    if self._compares(bucket, piece.spec):
                        self.compared.append(piece)
        self._begin()

    def _counts_or_replicates(self, number: int, bucket: BucketState, spec: Spec) -> bool:
        """Return whether this rank, or another one of its axis `replicate`, counts elements of a bucket."""
        owns_embedding = self.mesh["pp"].rank == self.table.rank_of[0]
        first = number < self.table.depth and spec.copy == 0
        return first and (owns_embedding or not bucket.plan.tied)

    def _compares(self, bucket: BucketState, spec: Spec) -> bool:
        """Return whether the gradient of a shard of the batch is whole where it is reduced.

        That of experts is of several ranks' tokens. Uses of a tied embedding can be summed later.
        """
        plan, each = bucket.plan, bucket.gradients[0].zero_group.each
        whole = not plan.then and (not each if plan.over else len(bucket.gradients) == 1)
        return self._noise and whole and plan.domain == DENSE and spec.updated

    # ------------------------------------------------------------ a step

    def hold(self, action: Action) -> None:
        """Have buffers for what a backward, or one part of it, adds to."""
        group = self._run.group_of(action.index // self.table.segments)
        gradients = added_to(action, self.stages)
        if not all(gradient.holds(group) for gradient in gradients):
            self._make_room()
        for gradient in gradients:
            gradient.hold(group)

    def added(self, action: Action) -> None:
        """Take note that a backward, or one part of it, has added to its gradients."""
        for gradient, group in self._completed.get(action, ()):
            gradient.complete(group)

    def sum(self, action: Action, work: Work) -> None:
        """Run SUM: start summing a bucket over an axis that isn't the data axis.

        The part is which of the bucket's axes, if there are two; the second waits for the first.
        """
        _, number, stage, which = action
        bucket = self.stages[stage].buckets[number]
        axis = self.mesh[(bucket.plan.over + bucket.plan.then)[which or 0]]
        buffer = self._summing.pop((stage, number)).wait() if which else self._added_here(bucket)
        self._summing[stage, number] = all_reduce(buffer, axis)
        self.advance()

    def reduce(self, action: Action, work: Work) -> None:
        """Run REDUCE: start reducing over the data axis what the step, or the part, has added."""
        _, number, stage, microbatch = action
        bucket = self.stages[stage].buckets[number]
        # segments of a sequence descend
        last = microbatch in (None, self.table.num_microbatches - self.table.segments)
        if bucket.plan.over:
            self._summing.pop((stage, number)).wait()
            self._note_shard(stage, bucket)
            self._reduce(bucket.gradients[0], last)
        else:
            for gradient in bucket.gradients:
                gradient.finish()
                self._note_shard(stage, bucket)
                self._reduce(gradient, last)
        self.advance()

    def _note_shard(self, stage: int, bucket: BucketState) -> None:
        """Note the squares of what this rank's shard of the batch has added to a bucket."""
        if self._noise:
            gradient = bucket.gradients[0]
            compared = (spec for spec in gradient.map.specs if self._compares(bucket, spec))
            counted = (spec for spec in compared if self._counts_or_replicates(stage, bucket, spec))
            self.squares_of_shards += noise_scale.squares(gradient.view(spec) for spec in counted)

    def wait(self) -> None:
        """Wait for everything that was started, and begin anew."""
        self._wait_for_reductions()
        for pending in self._summing.values():
            pending.wait()
        self._begin()

    def scale(self, factor: float) -> None:
        """Multiply the gradients of all pieces that are trained; what is counted is left whole."""
        for piece in self.pieces:
            if piece.spec.trained:
                piece.grad.mul_(factor)

    # ------------------------------------------------------------ over the data axis

    def _reduce(self, gradient: Gradient, last: bool) -> None:
        """Start reducing a gradient. Where no other rank has a part of it, it is added to its sum at once."""
        if gradient.zero_group.alone:
            gradient.accept(gradient.whole)
            gradient.give_back()
            return
        while gradient.zero_group.sums_in_copies and len(self._reducing) >= TOGETHER:
            self._wait_for_oldest()
        uneven = isinstance(gradient, TreeGradient) and not gradient.zero_group.division.is_even
        self._reducing.append(SubtreeReduction(gradient) if uneven else _Reduction(gradient, last))
        self.most_bytes = max(self.most_bytes, sum(reduction.num_bytes for reduction in self._reducing))

    def _begin(self) -> None:
        self._summing: dict[tuple[int, int], Pending] = {}  # by stage and bucket
        self._reducing: deque[_Reduction | SubtreeReduction] = deque()
        # how often buffers were taken in this step, and reductions that are over
        self._takings = self._num_reduced = 0

    def advance(self) -> None:
        """Advance every reduction whose turn it is; between instructions, too."""
        for reduction in self._reducing:
            if not reduction.scattered:
                break
            reduction.start_summing()

    def _wait_for_reductions(self) -> None:
        for reduction in self._reducing:
            reduction.start_summing()
        while self._reducing:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self._reducing.popleft().wait()
        self._num_reduced += 1

    def _make_room(self) -> None:
        """Wait for reductions whose memory is needed: how many, plan/predict/pool_sizes.py says."""
        while self._num_reduced < self._waits[self._takings]:
            self._wait_for_oldest()
        self._takings += 1

    # ------------------------------------------------------------ over other axes

    def _added_here(self, bucket: BucketState) -> torch.Tensor:
        """Return what all uses of a bucket here have added; after the data axis, its shards."""
        first, *others = summed_in(bucket, self.stages)
        if bucket.plan.then:
            self._wait_for_reductions()
            for gradient in others:
                first.shard += gradient.shard
            return first.shard
        first.finish()
        for gradient in others:
            gradient.finish()
            first.whole += gradient.whole
            gradient.give_back()
        return first.whole


class _Reduction:
    """The sum of one bucket over the data axis, under way: over `shard`, then over `replicate`.

    The second is started when the first is complete, in the order in which all ranks started the
    first. ZeRO-0 has no shards: the whole is summed over `replicate`, in the order of a shard.
    last: nothing more will be added in this step; otherwise the shard waits for the rest.
    num_bytes: of what is there for this sum alone.
    """

    def __init__(self, gradient: Gradient, last: bool):
        self._gradient = gradient
        self._zero_group = gradient.zero_group
        self._last = last
        whole, shard = gradient.to_reduce()
        self.num_bytes = 0 if whole is gradient.whole else whole.nbytes
        if self._zero_group.sums_whole:
            self._scattering = all_reduce(whole, self._zero_group.replicate)
        else:
            self._scattering = reduce_scatter(whole, self._zero_group.shard, shard)
        self._lent = gradient.lend()
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
        if self._zero_group.each:
            self._gradient.accept(reduced)
            reduced = self._gradient.shard
        if self._last and not self._zero_group.sums_whole:
            self._summing = all_reduce(reduced, self._zero_group.replicate)

    def wait(self) -> None:
        """Wait for both, and give the buffer back."""
        self.start_summing()
        if self._summing is not None:
            reduced = self._summing.wait()
            if not self._zero_group.each:
                self._gradient.accept(reduced)
        if self._lent is not None:
            self._zero_group.gradients.give_back(self._lent)


class SubtreeReduction:
    """The same sum over data ranks that have several subtrees of it each.

    Ranks exchange the shards of all subtrees and add those of their own shard as the tree says
    (plan/division/batch_division.py). A rank with fewer sends its last again, which nobody reads.
    num_bytes: of what arrives.
    """

    def __init__(self, gradient: TreeGradient):
        self._gradient = gradient
        self._zero_group = zero_group = gradient.zero_group
        self._sent = sent = gradient.take_subtrees()
        number = zero_group.division.most_subtrees
        self._received = [torch.empty_like(sent[0]) for _ in range(number)]
        self.num_bytes = sum(received.nbytes for received in self._received)
        axis = zero_group.shard
        self._exchanges = [
            all_to_all(sent[min(at, len(sent) - 1)], axis, received)
            for at, received in enumerate(self._received)
        ]

    @property
    def scattered(self) -> bool:
        """Whether all shards have arrived."""
        return all(exchange.done for exchange in self._exchanges)

    def start_summing(self) -> None:
        """Sum, unless that is done; wait for the shards."""
        if not self._exchanges:
            return
        for exchange in self._exchanges:
            exchange.wait()
        self._exchanges = []
        self._gradient.shard.copy_(self._sum())
        self._received = []

    def _sum(self) -> torch.Tensor:
        """Return the sum of all subtrees of this rank's shard, in memory that arrived."""
        division, size = self._zero_group.division, self._zero_group.size
        shards = [received.view(size, -1) for received in self._received]
        sums = SubtreeSums(torch.Tensor.add_)
        for rank in range(size):
            for at, subtree in enumerate(division.run(rank).subtrees):
                sums.add(subtree, shards[at][rank])
        (total,) = sums.sums
        return total

    def wait(self) -> None:
        """Wait for the sum, and give the buffers back."""
        self.start_summing()
        for subtree in self._sent:
            self._zero_group.gradients.give_back(subtree)
        self._sent = []

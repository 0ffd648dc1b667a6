"""ZeRO (arXiv:1910.02054; FSDP): weights, gradients and optimizer state of each bucket in shards.

They are divided over the shard axis.

    parallel.zero  weights                       gradients                         optimiser
    0              whole                         whole                             whole: the shard
                                                                                   axis has size 1
    1              whole                         whole                             shard
    2              whole                         whole from the first backward     shard
                                                 that adds to them until they are
                                                 reduced: in each microbatch, or
                                                 once with
                                                 parallel.reduce = "step"
    3              whole from GATHER to          the same                          shard
                   RELEASE, else the shard;
                   with parallel.gather = "step"
                   in memory that stays

With parallel.reduce = "microbatch" 0 and 1 have whole gradients in lent buffers as well: 0 adds
them up whole, 1 in shards. Then all four add the same numbers in the same order.

The ranks of `shard` divide the state among them; those of `replicate` have the same shard (HSDP,
arXiv:2304.11277, section 3.2). A gradient is summed by a reduce-scatter over the first and an
all-reduce of the shard over the second. Which axes these are, a bucket's domain says
(plan/division/domains.py).
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_gather
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.progress import Pending
from mpitrain.config import Config
from mpitrain.kernels.pinned import on_host
from mpitrain.kernels.precision import wide, wire_type
from mpitrain.parallel.zero.initial import initialise
from mpitrain.parallel.zero.parameters import Parameter
from mpitrain.parallel.zero.pool import Pool
from mpitrain.plan.declared.parameters import Spec
from mpitrain.plan.division.batch_division import BatchDivision, division_of
from mpitrain.plan.division.buckets import BucketMap
from mpitrain.plan.division.domains import COUNTED, domains_of, drops_weights
from mpitrain.plan.predict.pool_sizes import Needed

ONE_MICROBATCH = BatchDivision(1, 1, in_tree=False)


class ZeroGroup:
    """How far the state of a domain is divided, and over which ranks. Without axes, this rank has everything.

    each: gradients are reduced after every microbatch.
    division: of the microbatches of a step; in a tree, see parallel/zero/tree_accumulation.py.
    wire: what gradients are rounded to before they are sent; None, if they aren't.
    offload: master weights are in host memory.
    exact: weights are computed with as the optimiser has them, whatever the others are rounded to.
    drops_weights: after each use (plan/division/domains.py); otherwise their memory stays, and the
    shard lies in it.
    cores: that this rank may use while it makes its weights.
    weights, gradients: lend the buffers of what isn't kept whole.
    """

    def __init__(self, stage: int = 0, shard: Axis | None = None, replicate: Axis | None = None, *,
        each: bool = False, division: BatchDivision = ONE_MICROBATCH, wire: torch.dtype | None = None,
        offload: bool = False, exact: bool = False, drops_weights: bool = False, cores: int = 1,
    ):  # fmt: skip
        self.stage = stage
        self.shard = shard
        self.replicate = replicate
        self.each = each
        self.division = division
        self.wire = wire
        self.exact = exact
        self.offload = offload
        self.cores = cores
        self.lends_gradients = stage >= 2 or each
        self.rank, self.size = (shard.rank, shard.size) if shard is not None else (0, 1)
        self.drops_weights = drops_weights
        # the axis that reads the gradients of the others first
        self._reduced = shard if self.size > 1 else replicate
        # ranks with unequal microbatches hold other buffers
        allocate = self.allocate if division.is_even else _zeros
        self.weights, self.gradients = Pool(self.allocate), Pool(allocate)

    def type_of_weights(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type of weights beside those of `dtype`."""
        return wide(dtype) if self.exact else dtype

    @property
    def sums_in_copies(self) -> bool:
        """Whether a sum over data ranks holds memory besides the buffers of gradients."""
        return self.wire is not None or not self.division.is_even

    @property
    def sums_whole(self) -> bool:
        """Whether what a microbatch has added is summed whole: ZeRO-0 has no shards."""
        return self.each and self.stage == 0

    @property
    def first(self) -> bool:
        """Whether this rank is the one, of those with the same shard, that counts and saves it."""
        return self.replicate is None or self.replicate.rank == 0

    @property
    def alone(self) -> bool:
        """Whether no other rank has any of this state: nothing of it is summed over ranks."""
        return self.size == 1 and (self.replicate is None or self.replicate.size == 1)

    def allocate(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return zeroed memory, on a host shared with the ranks that will read it. Collective over them."""
        if self._reduced is None or device.type != "cpu" or not length:
            return _zeros(length, dtype, device)
        return torch.from_numpy(self._reduced.allocate(length * dtype.itemsize)).view(dtype)


def zero_groups_of(config: Config, mesh: Mesh) -> dict[str, ZeroGroup]:
    """Return how a rank divides the state of each domain."""
    facts = {
        "each": config.parallel.reduce == "microbatch",
        "division": division_of(config),
        "offload": config.memory.offload in ("optimizer", "all"),
        "cores": mesh.cores_of_rank,
    }
    groups = {}
    for name, domain in domains_of(config).items():
        shard = mesh[domain.shard]
        replicate = mesh[domain.replicate]
        sent = shard.size * replicate.size > 1
        exact = name == COUNTED
        wire = wire_type(config.precision) if sent and not exact else None
        more = {"wire": wire, "exact": exact, "drops_weights": drops_weights(config, name)}
        groups[name] = ZeroGroup(config.parallel.zero, shard, replicate, **more, **facts)
    return groups


def reserve(
    zero_groups: Mapping[str, ZeroGroup],
    needed: Needed,
    dtype: torch.dtype,
    device: torch.device,
    training: bool = True,
) -> None:
    """Allocate what programs will borrow; without training no gradients.

    Collective over each domain's ranks, which have the same programs.
    dtype: of weights.
    """
    for domain, zero_group in zero_groups.items():
        zero_group.weights.reserve(needed.weights[domain], zero_group.type_of_weights(dtype), device)
        if training:
            zero_group.gradients.reserve(needed.gradients[domain], wide(dtype), device)


class ParameterShard(NamedTuple):
    """What one rank updates of a parameter.

    Elements [begin, end) of its box, row by row, in the optimiser's precision.
    """

    spec: Spec
    begin: int
    end: int
    weight: torch.Tensor
    grad: torch.Tensor


class Weights:
    """The weights of a bucket.

    `shard` is this rank's part, `master` the same in the optimiser's precision, and always there;
    without masters it is `shard` itself: nothing updates it.

    leaving: offloaded masters as they are computed with, on their way from host memory to the
    shard.
    arriving: the other parts, on their way; whoever computes waits for it first.
    """

    def __init__(
        self,
        mapped: BucketMap,
        dtype: torch.dtype,
        device: torch.device,
        zero_group: ZeroGroup,
        seed: int | None,
        masters: bool = True,
    ):
        self.map = mapped
        self._zero_group = zero_group
        self._bound = []
        self.arriving: Pending | None = None
        self._users = 0  # of a tied embedding, two stages of this rank may use the same
        begin, end = mapped.bounds(zero_group.rank)
        self._memory: torch.Tensor | None = None  # of the whole, unless it is lent
        if zero_group.drops_weights:
            self.shard = _zeros(end - begin, dtype, device)
        else:
            make = zero_group.allocate if zero_group.size > 1 else _zeros
            self._memory = make(mapped.length, dtype, device)
            self.shard = self._memory[begin:end]
        self.whole = None if zero_group.stage == 3 else self._memory
        kind = torch.promote_types(dtype, torch.float32)
        self.leaving: torch.Tensor | None = None
        if zero_group.offload:
            self.master = on_host(end - begin, kind, device).zero_()
            self.leaving = self.master if dtype == kind else on_host(end - begin, dtype, device)
        else:
            same = dtype == kind or not masters
            self.master = self.shard if same else _zeros(end - begin, kind, device)
        self._initialise(seed)

    def _initialise(self, seed: int | None) -> None:
        """Make what this rank holds, each element once."""
        begin, end = self.map.bounds(self._zero_group.rank)
        # on a CPU memory that more threads touch would be theirs (cluster/threads.py)
        threads = self._zero_group.cores if self.shard.is_cuda else torch.get_num_threads()
        initialise(self.map, begin, end, seed, self.master, threads)
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        if self.whole is not None:
            for first, last in ((0, begin), (end, self.map.length)):
                initialise(self.map, first, last, seed, self.whole[first:last], threads)

    @property
    def divided(self) -> bool:
        """Whether other ranks have parts of it."""
        return self._zero_group.size > 1

    def bind(self, parameter: Parameter) -> None:
        """Let a parameter look at its weights, now and whenever they are fetched."""
        self._bound.append(parameter)
        if self.whole is not None:
            parameter.data = _view(self.whole, self.map, parameter.spec)

    def views(self) -> Iterator[tuple[Spec, torch.Tensor]]:
        """Yield each parameter with its weights, which must be here."""
        yield from ((spec, _view(self.whole, self.map, spec)) for spec in self.map.specs)

    def gather(self) -> None:
        """Start fetching the other parts. ZeRO-3 only."""
        self._users += 1
        if self._users == 1:
            self.whole = self._memory
            if self._memory is None:
                self.whole = self._zero_group.weights.borrow(self.map.length)
            for parameter in self._bound:
                parameter.data = _view(self.whole, self.map, parameter.spec)
            self.spread()

    def release(self) -> None:
        """Drop the parts of other ranks, with which nobody computes any more. ZeRO-3 only."""
        self._users -= 1
        if self._users == 0:
            self.wait()
            if self._memory is None:
                self._zero_group.weights.give_back(self.whole)
            self.whole = None
            for parameter in self._bound:
                parameter.data = None

    def spread(self) -> None:
        """Start sending this rank's part to the others, and fetching theirs.

        Collective over the shard axis.
        """
        begin, end = self.map.bounds(self._zero_group.rank)
        own = self.whole[begin:end]
        if own.data_ptr() != self.shard.data_ptr():
            own.copy_(self.shard)
        if self.divided:
            self.arriving = all_gather(own, self._zero_group.shard, self.whole)

    def update(self) -> None:
        """Take over what the optimiser did to `master`.

        Out of host memory the copy is only started, on the stream that computes: what is computed
        next waits for it, and so does what changes `master` next, for it waits for gradients that
        come after.
        """
        if self.leaving is not None:
            if self.leaving is not self.master:
                self.leaving.copy_(self.master)
            self.shard.copy_(self.leaving, non_blocking=True)
        elif self.master is not self.shard:
            self.shard.copy_(self.master)

    @property
    def num_bytes(self) -> int:
        """Bytes that stay between steps, without masters."""
        return (self.shard if self._memory is None else self._memory).nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of offloaded masters."""
        if self.leaving is None:
            return 0
        return self.master.nbytes + (0 if self.leaving is self.master else self.leaving.nbytes)

    def wait(self) -> None:
        """Wait for what is on its way."""
        if self.arriving is not None:
            self.arriving.wait()
            self.arriving = None


class Gradient:
    """The gradients of one use of a bucket.

    `whole`, which the backward adds to, and `shard`, where the sum over the ranks ends up.

    They are zero from zero() or hold() on for those that look by their parameters, and for all
    others from finish() on: most are written by the first product that is added, and a pass of
    zeros before that would take as long as adding them.
    """

    def __init__(self, mapped: BucketMap, dtype: torch.dtype, device: torch.device, zero_group: ZeroGroup):
        self.map = mapped
        self.zero_group = zero_group
        self._bound = []
        begin, end = mapped.bounds(zero_group.rank)
        self.whole: torch.Tensor | None = None
        if zero_group.lends_gradients:
            self.shard = torch.zeros(end - begin, dtype=dtype, device=device)
        else:
            self.whole = zero_group.allocate(mapped.length, dtype, device)
            self.shard = self.whole[begin:end]

    def bind(self, parameter: Parameter) -> None:
        """Let a parameter look at its gradient, now and whenever there is a buffer for it."""
        self._bound.append(parameter)
        if self.whole is not None:
            parameter.grad = _view(self.whole, self.map, parameter.spec)

    def view(self, spec: Spec) -> torch.Tensor:
        """Return the gradient of a parameter, whose buffer must be here."""
        return _view(self.whole, self.map, spec)

    def zero(self) -> None:
        """Start a step."""
        if self.whole is not None:
            self._begin()
        elif self.zero_group.each:
            self.shard.zero_()

    def holds(self, group: range) -> bool:
        """Whether there is a buffer to add to."""
        return self.whole is not None

    def hold(self, group: range) -> None:
        """Have a buffer to add to, from the pool if there is none yet.

        group: of microbatches that are summed apart.
        """
        if self.whole is None:
            self.whole = self.zero_group.gradients.borrow(self.map.length)
            self._look_at(self.whole)
            self._begin()

    def complete(self, group: range) -> None:
        """Nothing more will be added by a group of microbatches."""

    def finish(self) -> None:
        """Nothing more will be added in this step, or before this buffer is reduced."""
        for parameter in self._bound:
            parameter.settle()

    def _begin(self) -> None:
        """Let all be zero: parameters when somebody looks, what is between them now.

        A buffer that was lent still has something there.
        """
        for parameter in self._bound:
            parameter.begin()
        for between in self.map.gaps():
            self.whole[between].zero_()

    def _look_at(self, flat: torch.Tensor) -> None:
        for parameter in self._bound:
            parameter.grad = _view(flat, self.map, parameter.spec)

    def to_reduce(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what to sum over the shard axis, and where this rank's shard of the sum goes.

        It is the same tensor twice, if it is summed in place.
        """
        zero_group = self.zero_group
        wire = self.zero_group.wire
        whole = self.whole if wire is None else self.whole.to(wire)
        if zero_group.sums_whole:
            return whole, whole
        if not zero_group.each and wire is None:
            return whole, self.shard
        begin, end = self.map.bounds(zero_group.rank)
        return whole, whole[begin:end]  # nobody else needs this rank's part of it

    def lend(self) -> torch.Tensor | None:
        """Let go of the buffer that is being reduced, if it is lent; it is to be given back after that."""
        whole = self.whole
        if not self.zero_group.lends_gradients:
            return None
        self.drop()
        return whole

    def accept(self, reduced: torch.Tensor) -> None:
        """Accept what a reduction brought: add it to the shard, or copy it there."""
        if self.zero_group.each:
            self.shard += reduced
        elif reduced.data_ptr() != self.shard.data_ptr():
            self.shard.copy_(reduced)

    def give_back(self) -> None:
        """Give the buffer back, if it is lent: its content is somewhere else now."""
        if self.zero_group.lends_gradients:
            self.zero_group.gradients.give_back(self.whole)
            self.drop()

    def drop(self) -> None:
        """Have no buffer any more."""
        self.whole = None
        for parameter in self._bound:
            parameter.grad = None


def pieces_of(weights: Weights, gradient: Gradient) -> Iterator[ParameterShard]:
    """Yield what this rank updates of a bucket."""
    mapped = weights.map
    rank = gradient.zero_group.rank
    first, _ = mapped.bounds(rank)
    for spec, begin, end in mapped.runs(rank):
        start = mapped.starts[mapped.specs.index(spec)] - first
        here = slice(start + begin, start + end)
        yield ParameterShard(spec, begin, end, weights.master[here], gradient.shard[here])


def _view(flat: torch.Tensor, mapped: BucketMap, spec: Spec) -> torch.Tensor:
    start = mapped.starts[mapped.specs.index(spec)]
    return flat[start : start + spec.numel].view(spec.shape)


def _zeros(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(length, dtype=dtype, device=device)

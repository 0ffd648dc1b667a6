"""The buffers that a program borrows.

weights    with ZeRO-3: from GATHER to RELEASE, unless they are kept over the step, or no other rank
           has a part of them
gradients  with ZeRO-2 and 3, sums after each microbatch, or in a tree: from the first backward that
           adds to them until they are reduced. A reduction travels under the next computation. A
           backward that takes buffers after that waits for it, for they may lie in its memory. What
           no other rank has a part of is added to its sum at once.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from mpitrain.plan.division.batch_division import SubtreeSums, TreeRun
from mpitrain.plan.division.domains import domains_of, drops_weights, lends_gradients
from mpitrain.plan.division.gradient_accumulation import StageLike, added_to, completed_by, summed_in
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.arena import Arena, Stay, arena_of
from mpitrain.plan.predict.bucket_buffers import FIRST, held_by
from mpitrain.schedules.actions import COMPUTE, OF_GRADIENTS, Action
from mpitrain.schedules.pairs import grouped

TRAINING = "training"
EVALUATION = "evaluation"
ALL = range(0)  # microbatches, where they are added to one buffer
Borrowed = dict[str, list[Stay]]  # by domain, in the order in which they are taken


class Needed(NamedTuple):
    """The memory that is lent, by domain.

    waits: for each instruction that takes buffers of gradients, how many reductions of the step
    have to be complete then.
    """

    weights: dict[str, Arena]
    gradients: dict[str, Arena]
    waits: list[int]


def needed_by(plan: Plan, rank: int, place: tuple[int, int] = FIRST, dp_rank: int | None = None) -> Needed:
    """Return what the programs of a pipeline rank will borrow.

    place: as in held_by. dp_rank: whose microbatches; None: of the data rank that borrows most.
    """
    run = plan.run_of(plan.division.rank_of_most_sums if dp_rank is None else dp_rank)
    lends = lends_gradients(plan.config.parallel)
    stages = held_by(plan, rank, place)
    training = plan.lowered_training.ranks[rank]
    dropped = {name for name in domains_of(plan.config) if drops_weights(plan.config, name)}
    weights: dict[str, Borrowed] = {TRAINING: {}, EVALUATION: {}}
    if dropped:
        programs = {TRAINING: training, EVALUATION: plan.lowered_evaluation.ranks[rank]}
        weights = {name: weights_of(program, stages, dropped) for name, program in programs.items()}
    borrowed: Borrowed = {}
    waits: list[int] = []
    if lends or plan.config.numerics.reproducible == "layout":
        played = _Gradients(plan, rank, stages, lends, run)
        borrowed, waits = played.lender.borrowed(), played.waits
    domains = domains_of(plan.config)
    of_weights = {name: _arena(name, weights) for name in domains}
    of_gradients = {name: _arena(name, {TRAINING: borrowed}) for name in domains}
    return Needed(of_weights, of_gradients, waits)


def alone_in(plan: Plan) -> set[str]:
    """Return the domains of which no two ranks have the same parameters: they aren't summed over ranks."""
    sizes = {axis: len(ranks) for axis, ranks in plan.axes.of(0).items()}
    domains = domains_of(plan.config).items()
    return {name for name, domain in domains if sizes[domain.shard] * sizes[domain.replicate] == 1}


def _arena(domain: str, borrowed: Mapping[str, Borrowed]) -> Arena:
    return arena_of({program: by_domain.get(domain, []) for program, by_domain in borrowed.items()})


class _Lender:
    """Notes what is taken and given back. takings: how many there were so far."""

    def __init__(self) -> None:
        self.takings = 0
        self._stays: dict[str, list[list[int]]] = defaultdict(list)
        self._open: dict[object, list[int]] = {}
        self._sent: list[list[list[int]]] = []  # by reduction, in the order in which they were

    def has(self, key: object) -> bool:
        return key in self._open

    def take(self, key: object, domain: str, length: int) -> None:
        """Lend a buffer in the present taking, which is the last one."""
        self._open[key] = [length, self.takings - 1, 0]
        self._stays[domain].append(self._open[key])

    def send(self, keys: Sequence[object]) -> None:
        """Have buffers reduced together: they aren't added to any more, and not free yet."""
        self._sent.append([self._open.pop(key) for key in keys])

    def arrive(self, number: int) -> None:
        """Have the buffers of the first so many reductions free for the next taking."""
        for stay in chain(*self._sent[:number]):
            stay[2] = self.takings
        del self._sent[:number]

    def give_back(self, key: object) -> None:
        """Have a buffer free for the next taking."""
        self._open.pop(key)[2] = self.takings

    def borrowed(self) -> Borrowed:
        """Return all buffers; those that nobody gave back stay to the end."""
        for key in list(self._open):
            self.give_back(key)
        self.arrive(len(self._sent))
        return {domain: [Stay(*stay) for stay in stays] for domain, stays in self._stays.items()}


def weights_of(
    program: Sequence[Action], stages: Mapping[int, StageLike], dropped: Collection[str]
) -> Borrowed:
    """Play what weights do with their buffers. dropped: the domains whose weights are dropped after a use."""
    users = defaultdict[int, int](int)
    lender = _Lender()
    for action in program:
        if action.kind not in ("GATHER", "RELEASE"):
            continue
        bucket = stages[action.stage].buckets[action.index]
        if bucket.plan.domain not in dropped:
            continue
        key = id(bucket.weights)
        users[key] += 1 if action.kind == "GATHER" else -1
        if action.kind == "GATHER" and users[key] == 1:
            lender.takings += 1
            lender.take(key, bucket.plan.domain, bucket.weights.length)
        elif action.kind == "RELEASE" and not users[key]:
            lender.give_back(key)
    return lender.borrowed()


def reductions_of(plan: Plan, rank: int) -> list[tuple[Any, str, int]]:
    """Return the sums over data ranks of a pipeline rank's program, where gradients are lent.

    Each with its buffer, its domain, and how many before it are waited for by then.
    """
    run = plan.run_of(plan.division.rank_of_most_sums)
    return _Gradients(plan, rank, held_by(plan, rank), lends=True, run=run).reduced


class _Gradients:
    """What the gradients of a rank do with their buffers, played through its program.

    A tree has a buffer for each group of microbatches, and for each sum that waits. run: of the
    rank's microbatches.
    """

    def __init__(self, plan: Plan, rank: int, stages: Mapping[int, StageLike], lends: bool, run: TreeRun):
        program = plan.lowered_training.ranks[rank]
        self.stages = stages
        self.table = plan.table
        self.run = run
        self.lends = lends
        self.sends = lends or not plan.division.is_even
        self.tree = plan.config.numerics.reproducible == "layout"
        self.alone = alone_in(plan)
        self.lender = _Lender()
        self.waits = list[int]()  # Needed.waits
        self._completed = completed_by(program, stages, self.table, run) if self.tree else {}
        # by gradient, the sums of a tree that wait for others, and in the buffer of which group they are
        self._waiting: dict[int, SubtreeSums[range]] = {}  # (parallel/zero/tree_accumulation.py)
        self._domains = {
            id(gradient): b.plan.domain
            for state in stages.values()
            for b in state.buckets
            for gradient in b.gradients
        }
        # those that were started, each with how many before it are over then
        self.reduced = list[tuple[Any, str, int]]()
        # reductions; under which something was computed; waited for
        self._num_started = self._num_travelled = self._num_over = 0
        for group in grouped(program):
            self.play(group)

    def play(self, group: Sequence[Action]) -> None:
        """Play what starts together."""
        for action in group:
            self._take(action)
        if any(action.kind in COMPUTE for action in group):
            self._num_travelled = self._num_started
        for action in group:
            for gradient, number in self._completed.get(action, ()):
                self._complete(id(gradient), number)
            self._give_back(action)

    def _take(self, action: Action) -> None:
        added = added_to(action, self.stages)
        if not added or self.run.is_empty(action.index // self.table.segments):
            return
        group = self.run.group_of(action.index // self.table.segments) if self.tree else ALL
        keys = {(id(held), group): held for held in added}
        taken = {key: gradient for key, gradient in keys.items() if not self.lender.has(key)}
        if not taken:
            return
        self.lender.arrive(self._num_travelled - self._num_over)
        self._num_over = self._num_travelled
        self.waits.append(self._num_over)
        self.lender.takings += 1
        for key, gradient in taken.items():
            self.lender.take(key, self._domains[id(gradient)], gradient.length)

    def _complete(self, gradient: int, group: range) -> None:
        """Add a group's sum to its neighbours', and give its buffer back."""

        def join(earlier: range, later: range) -> range:
            self.lender.give_back((gradient, later))
            return earlier

        self._waiting.setdefault(gradient, SubtreeSums(join)).add(group, group)

    def _give_back(self, action: Action) -> None:
        for gradient in given_back(action, self.stages, self.sends):
            groups = self._waiting.pop(id(gradient)).sums if self.tree else [ALL]
            keys = [(id(gradient), group) for group in groups]
            domain = self._domains[id(gradient)]
            if self.sends and action.kind == "REDUCE" and domain not in self.alone:
                self.reduced.append((gradient, domain, self._num_over))
                self.lender.send(keys)
                self._num_started += 1
            else:
                for key in keys:
                    self.lender.give_back(key)


def given_back(action: Action, stages: Mapping[int, StageLike], lends: bool) -> Sequence[Any]:
    """Return the gradients whose buffers an instruction gives back.

    Where gradients are whole all the time, what a tree has lent is copied to them once all
    microbatches are summed. Else a use of a tied embedding is given back when it has been added to
    the first, all else when it has been reduced.
    """
    if action.kind not in OF_GRADIENTS:
        return []
    bucket = stages[action.stage].buckets[action.index]
    if action.kind == "REDUCE":
        read = bucket.gradients[:1] if bucket.plan.over else bucket.gradients
        return read if lends or not bucket.plan.over else []
    if action.part or not bucket.plan.over:
        return []
    return summed_in(bucket, stages)[1 if lends else 0 :]

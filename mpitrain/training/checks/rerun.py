"""Silent data corruption: does a step compute the same when it is computed again?

Forward and backward run twice from the same weights, before the update. Each rank notes digests of
what it gives to every operation, of what comes of it, and of its gradients (comm/tap.py). Where the
first difference is in what this rank gives, this rank is the cause; else another one is.

    A B alike                    the step uses B
    A B differ, C like one       transient: the step uses C
    all three differ             persistent: the run ends

An error that comes back alike every time is seen by replicas.py or `mpitrain verify` only.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpitrain.actor.actor import Actor
from mpitrain.actor.step_work import Work
from mpitrain.cluster.unhealthy_nodes import node_name
from mpitrain.comm.base.buffers import Array
from mpitrain.comm.base.world import World
from mpitrain.comm.tap import TappedOperation
from mpitrain.training.checks.digests import digest

GIVEN, CAME = "gives to", "gets from"
MOST_NAMED = 8


class RerunEvent(NamedTuple):
    """What was noted. way: GIVEN or CAME."""

    way: str
    which: TappedOperation


class Pass:
    """What one rank has noted of one pass: digests, in the order of their events. A tap."""

    def __init__(self):
        # by way, axis and number: receives are posted ahead, by any instruction
        self._digests = dict[tuple[str, str, int], tuple[int, RerunEvent]]()

    def given(self, which: TappedOperation, parts: Sequence[Array]) -> None:
        self._note(RerunEvent(GIVEN, which), parts)

    def came(self, which: TappedOperation, parts: Sequence[Array]) -> None:
        self._note(RerunEvent(CAME, which), parts)

    def _note(self, event: RerunEvent, parts: Sequence[Array]) -> None:
        self._digests[event.way, event.which.axis, event.which.number] = digest(parts), event

    def first_difference(self, other: "Pass") -> RerunEvent | None:
        """Return the first event, in the order of the other pass, that isn't the same in both."""
        own = {key: value for key, (value, _) in self._digests.items()}
        changed = (event for key, (value, event) in other._digests.items() if own.get(key) != value)
        return next(changed, None)


class RerunVerdict(NamedTuple):
    """What the passes of a step have shown, alike on all ranks.

    text: what was found, if anything was.
    persistent: all three passes differ; no gradient of this step can be trusted.
    nodes: of the ranks that computed differently.
    """

    text: str = ""
    persistent: bool = False
    nodes: tuple[str, ...] = ()


class RecomputeCheck:
    """Runs a step's gradient pass twice, a third time if they differ: a PassRunner. Collective.

    verdict: of the last pass.
    """

    def __init__(self, actor: Actor, world: World):
        self._actor = actor
        self._world = world
        self.verdict = RerunVerdict()

    def __call__(self, compute: Callable[[], Work]) -> Work:
        (_, first), (work, second) = self._noted(compute), self._noted(compute)
        difference = first.first_difference(second)
        if not any(self._world.all_gather("comparing two passes of a step", difference is not None)):
            return work
        work, third = self._noted(compute)
        own = difference is not None and difference.way == GIVEN
        like = [third.first_difference(earlier) is None for earlier in (first, second)]
        mine = (node_name(), difference if own else None, *like)
        self.verdict = _judge(self._world.all_gather("naming who computes differently", mine))
        return work

    def _noted(self, compute: Callable[[], Work]) -> tuple[Work, Pass]:
        # what an update has sent arrives in the first pass only
        for stage in self._actor.stages.values():
            for bucket in stage.state.buckets:
                bucket.weights.wait()
        noted = Pass()
        self._actor.mesh.listen(noted)
        work = compute()
        self._actor.mesh.listen(None)
        for number, piece in enumerate(self._actor.gradients.pieces):
            noted.given(TappedOperation("none", number, "gradient", piece.spec.name), [piece.grad])
        return work, noted


def _judge(reports: list[tuple[str, RerunEvent | None, bool, bool]]) -> RerunVerdict:
    """Return the verdict: who computed differently, and whether the run continues.

    reports: of each rank (node, its own difference, third pass like the first, like the second).
    """
    transient = any(all(repeated) for repeated in list(zip(*reports))[2:])
    wrong = [(rank, node, event) for rank, (node, event, *_) in enumerate(reports) if event]
    named = [f"rank {rank} on {node}, {_place(event)}" for rank, node, event in wrong]
    who = "; ".join(named[:MOST_NAMED]) or "no single rank: received messages differ from those sent"
    how = "persistent: all three passes differ"
    if transient:
        how = "transient: two of three passes agree, the step uses them"
    nodes = tuple(dict.fromkeys(node for _, node, _ in wrong))
    text = f"computing the same step twice gave different bits: {who}; {how}"
    return RerunVerdict(text, not transient, nodes)


def _place(event: RerunEvent) -> str:
    which = event.which
    if which.operation == "gradient":
        return f"in the gradient of {which.instruction}"
    return f"in {which.instruction}: what it {event.way} {which.operation} {which.number} of {which.axis}"

"""Slow ranks and slow links, named with their nodes every `comm.slow_after` steps and at the end.

    busy    a step's time without waits for messages, of each rank; divided by the work of its stage
    slow    a rank, if in three of four steps it was busy FACTOR times as long as the median of its
            stage's ranks, or of all ranks if it has the stage alone
    a link  between neighbouring nodes is slow if it carries less than 1 / LINK_FACTOR of the median
            of links, this one before included; measured by a few messages
            (comm/meters/link_speed.py), and if slow, again

Of two ranks the faster one is the median.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median_low, quantiles
from typing import NamedTuple

from mpitrain.cluster.unhealthy_nodes import node_name
from mpitrain.comm.base.world import World
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.meters.link_speed import between_nodes
from mpitrain.plan.plan import Plan

FACTOR, LINK_FACTOR = 1.4, 3.0
MOST_NAMED = 8
REMEMBERED = 64  # windows, of each link
UNHEALTHY_AFTER = 3  # windows in a row


class Busy(NamedTuple):
    """What a rank tells of some steps.

    group: ranks with the same work. often, middle: busy for so long in 3 of 4 steps, in 2 of 4.
    work: relative to others. waits: the ranks it waited for longest, with seconds a step.
    """

    node: str
    group: int
    often: float
    middle: float
    work: float
    waits: tuple[tuple[int, float], ...] = ()


class Stragglers:
    """Watches for slow ranks and links. say: on rank 0.

    unhealthy_node: one that has been slow for long enough to be replaced (recovery.replace_slow),
    alike on all ranks.
    """

    def __init__(self, plan: Plan, mesh: Mesh, world: World, say: Callable[[str], None]):
        self._every = plan.config.comm.slow_after
        self._mesh = mesh
        self._world = world
        self._say = say
        self._group = mesh.coordinates["pp"]
        num_microbatches = len(plan.run_of(mesh.coordinates["dp"]).leaves)
        self._work = _work(plan, mesh.coordinates["pp"]) * num_microbatches
        self._busy = list[float]()
        self._waits_before = mesh.progress.waited_for()
        self._links: dict[tuple[int, int], deque[float]] = defaultdict(partial(deque, maxlen=REMEMBERED))
        self.named = Counter[str]()
        self._windows = 0
        self._replace_slow = plan.config.recovery.replace_slow
        self._slow_windows = Counter[str]()  # in a row, of each node
        self.unhealthy_node = ""

    def step(self, step: int, step_s: float, waited_s: float) -> None:
        """Take note of a step; at the end of a window, tell who is slow. Then collective over all ranks."""
        if not self._every:
            return
        self._busy.append(step_s - waited_s)
        if len(self._busy) < self._every:
            return
        waits = self._mesh.progress.waited_for()
        before = self._waits_before
        steps = len(self._busy)
        waits_s = {rank: (s - before.get(rank, 0.0)) / steps for rank, s in waits.items()}
        longest = Counter(waits_s).most_common(3)
        often, middle, _ = quantiles(self._busy, n=4) if len(self._busy) > 1 else self._busy * 3
        mine = Busy(node_name(), self._group, often, middle, self._work, tuple(longest))
        busy_of_ranks = self._world.all_gather("who is slow", mine)
        for text in (*slow_ranks(busy_of_ranks), *self._slow_links([busy.node for busy in busy_of_ranks])):
            self.named[text.partition(":")[0]] += 1
            self._say(f"step {step}: {text}")
        if self._replace_slow:
            self._count_slow_nodes(busy_of_ranks, self._replace_slow)
        self._busy, self._waits_before, self._windows = [], waits, self._windows + 1

    def _count_slow_nodes(self, busy_of_ranks: Sequence[Busy], factor: float) -> None:
        slow = {busy_of_ranks[rank].node for _, rank in _slow(busy_of_ranks, factor)}
        self._slow_windows = Counter({node: self._slow_windows[node] + 1 for node in slow})
        (node, windows), *_ = self._slow_windows.most_common(1) or [("", 0)]
        self.unhealthy_node = node if windows >= UNHEALTHY_AFTER else ""

    def summary(self) -> str:
        """Say how often who was slow."""
        times = [f"  {who}, {count} of {self._windows} times" for who, count in self.named.most_common()]
        return "\n".join(["slow, by windows of comm.slow_after steps:", *times]) if times else ""

    def _slow_links(self, nodes: Sequence[str]) -> list[str]:
        """Measure links between nodes, and name those that are slow. Alike on all ranks."""
        if self._world.num_nodes == 1:
            return []
        speeds = between_nodes(self._world)
        if slow_links(speeds, self._links):  # once may be chance
            speeds = between_nodes(self._world)
        slow = slow_links(speeds, self._links)
        for a, b, speed in speeds:
            self._links[a, b].append(speed)
        return [
            f"link between {nodes[a]} (rank {a}) and {nodes[b]} (rank {b}): {speed / 1e6:.1f} MB/s, usual "
            f"are {usual / 1e6:.1f}"
            for a, b, speed, usual in slow[:MOST_NAMED]
        ]


def slow_ranks(busy_of_ranks: Sequence[Busy]) -> list[str]:
    """Name the ranks that are slow, the slowest first."""
    slow = _slow(busy_of_ranks, FACTOR)
    return [_describe(rank, times, busy_of_ranks) for times, rank in slow[:MOST_NAMED]]


def _slow(busy_of_ranks: Sequence[Busy], factor: float) -> list[tuple[float, int]]:
    """Return by how much ranks are slow that are busy `factor` times as long as usual; the slowest first."""
    groups = defaultdict[int, list[float]](list)
    for busy in busy_of_ranks:
        groups[busy.group].append(busy.middle / busy.work)
    of_all = median_low([time for times in groups.values() for time in times])
    usual = {group: median_low(times) if len(times) > 1 else of_all for group, times in groups.items()}
    slow = [
        (busy.middle / busy.work / usual[busy.group], rank)
        for rank, busy in enumerate(busy_of_ranks)
        if busy.often / busy.work > factor * usual[busy.group]
    ]
    return sorted(slow, reverse=True)


def _describe(rank: int, times: float, busy_of_ranks: Sequence[Busy]) -> str:
    waits_of_ranks = (dict(busy.waits) for busy in busy_of_ranks)
    waits = {other: waited[rank] for other, waited in enumerate(waits_of_ranks) if rank in waited}
    longest = sorted(waits, key=waits.get, reverse=True)[:3]
    waiting = ", ".join(f"rank {other} {waits[other] * 1e3:.0f} ms a step" for other in longest)
    longest_waits = f"; waited for it: {waiting}" * bool(waits)
    what = f"rank {rank} on {busy_of_ranks[rank].node} is slow"
    return f"{what}: busy {times:.1f} times as long as others with its work{longest_waits}"


def slow_links(
    now: Sequence[tuple[int, int, float]], before: Mapping[tuple[int, int], Sequence[float]]
) -> list[tuple[int, int, float, float]]:
    """Return (rank, rank, bytes/s, usual bytes/s) of slow links. before: what each has carried earlier."""
    speeds = {(a, b): speed for a, b, speed in now}
    slow = []
    for (a, b), speed in speeds.items():
        others = [other for link, other in speeds.items() if link != (a, b)]
        usual = median_low([*others, *before.get((a, b), ())] or [speed])
        if speed * LINK_FACTOR < usual:
            slow.append((a, b, speed, usual))
    return slow


def _work(plan: Plan, pp: int) -> float:
    length = plan.config.data.sequence
    stages = [plan.stage(number) for number in plan.table.chunks[pp]]
    return sum(placed.layer.flops(length) for stage in stages for block in stage.blocks for placed in block)

"""Which ranks share an axis, and what is started on it, for every axis of a layout.

Integers only: no MPI and no torch.

tp cp dp pp                the grid; dp and pp are coordinates, their ranks meet on the axes below
data                       ranks with the same parameters and other tokens: dp x cp
links                      pipeline ranks, which send one another activations and gradients
model                      ranks with the same tokens and other parameters: tp x pp
tied                       pipeline ranks with a copy of the tied embedding: of the first and the
                           last stage
mirror                     pipeline ranks with the same stages, of the two copies of a model that
                           run against each other
shard, replicate           of data: neighbours that divide the state among them; those that have the
                           same part of it
kv                         neighbours in tp that have the same key-value heads
matrix                     ranks that have parts of the same matrices: shard x tp, tp slowest
tokens                     ranks with parts of the same sequences: tp x cp
experts                    ranks over which the experts of a block are spread: etp x ep of the ranks
                           of tp x cp x dp (plan/settings/experts.py)
experts_near, experts_far  of these, the ones on this rank's node; those with its place on every
                           node (plan/settings/dispatch.py)
copies                     ranks with the same place on their nodes, which keep copies of one another's state
expert_shard,              for experts what shard, replicate and matrix are for the rest
expert_replicate,
expert_matrix
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mpitrain.comm.base.axis_operations import NOTHING, AxisOperations, carried
from mpitrain.comm.base.grid import Grid
from mpitrain.plan.declared.optimizers import optimizer_kind
from mpitrain.plan.declared.parameters import EXPERT
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.batch_division import division_of
from mpitrain.plan.division.domains import DENSE, DOMAINS
from mpitrain.plan.settings.dispatch import near_ranks
from mpitrain.schedules.table import Table

# most bytes that a rank tells all others at the end of a step, and more for each number of layers
TOTALS = 1024
METRIC_BYTES = 320
COPIES = "copies"
# what an axis shared by several ranks carries; `data`, `model`: by their size, `cp`: by its attention
CARRIED = {
    "tp": carried("all_reduce", "all_gather", "reduce_scatter", "shift"),
    "links": carried("send", "receive"),
    "tied": carried("all_reduce"),
    "mirror": carried("all_reduce"),
    "kv": carried("all_reduce"),
    "tokens": carried("all_reduce"),
    "experts": carried("all_gather", "all_to_all_v"),
    "experts_near": carried("all_to_all_v"),
    "experts_far": carried("all_to_all_v"),
    COPIES: carried("shift")._replace(heard=False),  # no part of what a step computes
}
MEANINGS = {  # for the table at the end of a run: what travels, between which ranks
    "tp": "parts of each layer's activations, between ranks that divide the layers",
    "cp": "keys and values, between ranks with parts of the same sequences",
    "data": "totals of a step, between ranks with the same parameters and other tokens",
    "links": "activations and their gradients, between pipeline ranks",
    "model": "totals of a step, between ranks with the same tokens and other parameters",
    "tied": "gradients of the tied embedding, between the first and the last stage",
    "mirror": "gradients, between pipeline ranks with the same stages of two copies of the model",
    "shard": "gradients and weights, between ranks that divide them",
    "replicate": "gradients, between ranks that have the same shard",
    "kv": "gradients of key-value heads, between ranks that have the same ones",
    "matrix": "parts of matrices for the optimiser, between the ranks that have them",
    "tokens": "gradients and losses of routers, between ranks with parts of the same sequences",
    "experts": "rows of tokens, between ranks that have other experts of a block",
    "experts_near": "rows of tokens, between ranks of a node with other experts",
    "experts_far": "rows of tokens, between nodes with other experts",
    COPIES: "copies of the state, from node to node (recovery.every)",
    "expert_shard": "gradients and weights of experts, between ranks that divide them",
    "expert_replicate": "gradients of experts, between ranks that have the same shard",
    "expert_matrix": "parts of experts' matrices for the optimiser, between the ranks that have them",
}
# shard, replicate, matrix
OF_DOMAIN = carried("reduce_scatter", "all_gather"), carried("all_reduce"), carried("all_to_all_v")
OF_EXPERTS = "tokens", "experts", "experts_near", "experts_far", *DOMAINS[EXPERT][:3]
ATTENTION = {
    "zigzag": carried("shift"),
    "ring": carried("shift"),
    "gather": carried("all_gather", "reduce_scatter"),
    "ulysses": carried("all_to_all"),
}


@dataclass(frozen=True)
class Axes:
    """The axes of a layout, in few integers: who shares one with a rank is computed when it is asked.

    divided: ranks that divide the state among them.
    repeats: neighbours in tp with the same key-value heads.
    ends: pipeline ranks with a copy of the tied embedding.
    mirrored: there are two copies of the model. matrices: parts of matrices are exchanged.
    num_metrics: numbers that layers make besides their outputs (actor/step_totals.py).
    folded: ep, etp, and ranks that divide the state of experts among them; None: no experts.
    near: ranks of the experts on one node, if rows are sent to nodes first; else 0.
    partner: the distance to the rank that keeps a copy of a rank's state; 0: none.
    subtrees: data ranks exchange shards of subtrees (plan/division/batch_division.py).
    """

    grid: Grid
    divided: int
    repeats: int
    ends: tuple[int, ...]
    mirrored: bool
    matrices: bool
    context: str
    num_metrics: int = 0
    folded: tuple[int, int, int] | None = None
    near: int = 0
    partner: int = 0
    subtrees: bool = False

    def of(self, rank: int) -> dict[str, Sequence[int]]:
        """Return the ranks of each axis that `rank` is on, itself included, in the order of the axis."""
        at = self.grid.coordinates(rank)
        degrees = self.grid.degrees
        data = self.grid.group(rank, "cp", "dp")
        own = at["cp"] + degrees["cp"] * at["dp"]  # its place in data
        part = own % self.divided
        kv = rank - rank % self.repeats
        shard = data[own - part : own - part + self.divided]
        mirror = {at["pp"], degrees["pp"] - 1 - at["pp"]} if self.mirrored else ()
        axes = {name: self.grid.group(rank, name) for name in degrees} | {
            "data": data,
            "links": self.grid.group(rank, "pp"),
            "model": self.grid.group(rank, "tp", "pp"),
            "tied": self._along_pp(rank, at["pp"], self.ends),
            "mirror": self._along_pp(rank, at["pp"], sorted(mirror)),
            "shard": shard,
            "replicate": data[part :: self.divided],
            "kv": range(kv, kv + self.repeats),
            "matrix": self._matrix(rank, shard, at["tp"], degrees["tp"]),
        }
        copies = {COPIES: self.partners(rank)} if self.partner else {}
        return axes | copies | self._expert_axes(rank)

    def _matrix(self, rank: int, shard: Sequence[int], place: int, size: int) -> tuple[int, ...]:
        """Return the ranks with parts of the same matrices, of which `rank` has part `place` of `size`."""
        return tuple(other - place + i for i in range(size) for other in shard) if self.matrices else (rank,)

    def _expert_axes(self, rank: int) -> dict[str, Sequence[int]]:
        if self.folded is None:
            return dict.fromkeys(OF_EXPERTS, (rank,))
        (ep, etp, divided), stride = self.folded, self.grid.size // self.grid.degrees["pp"]
        begin = rank // stride * stride
        inside = ep * etp
        group = begin + (rank - begin) // inside * inside
        alike = range(begin + (rank - begin) % inside, begin + stride, inside)
        part = (rank - begin) // inside
        shard = alike[part // divided * divided :][:divided]
        place = (rank - group) % self.near if self.near else 0
        near = range(rank - place, rank - place + self.near) if self.near else (rank,)
        far = range(group + place, group + inside, self.near) if self.near else (rank,)
        domain = DOMAINS[EXPERT]
        return {
            "tokens": self.grid.group(rank, "tp", "cp"),
            "experts": range(group, group + inside),
            "experts_near": near,
            "experts_far": far,
            domain.shard: shard,
            domain.replicate: alike[part % divided :: divided],
            domain.matrix: self._matrix(rank, shard, rank % etp, etp),
        }

    def partners(self, rank: int) -> Sequence[int]:
        """Return the ranks with the same place on their nodes; each sends copies to the next one."""
        return range(rank % self.partner, self.grid.size, self.partner)

    def holders(self, rank: int, replicate: str) -> tuple[int, int | None]:
        """Return the first rank with the part of a domain that `rank` has, and the first on another node."""
        first, *others = self.of(rank)[replicate]
        near = self.partner or self.grid.size
        return first, next((other for other in others if other // near != first // near), None)

    @cached_property
    def unreplicated(self) -> tuple[str, ...]:
        """The domains of which some part is on one node only, and is sent to another one."""
        names = [name for name in DOMAINS if self.partner and (self.folded is not None or name != EXPERT)]
        return tuple(
            name
            for name in names
            if any(self.holders(rank, DOMAINS[name].replicate)[1] is None for rank in range(self.grid.size))
        )

    def _along_pp(self, rank: int, pp: int, others: Sequence[int]) -> tuple[int, ...]:
        """Return the ranks at pipeline ranks `others`, if `pp` is among them; else `rank` alone."""
        stride = self.grid.size // self.grid.degrees["pp"]
        return tuple(rank + (other - pp) * stride for other in others) if pp in others else (rank,)

    @cached_property
    def carried(self) -> dict[str, AxisOperations]:
        """What each axis carries, alike for all ranks: nothing, if no two ranks share it."""
        sizes = {name: len(ranks) for name, ranks in self.of(0).items() if name != "pp"}
        sizes["tied"] = len(self.ends)  # in a table of the user's own, rank 0 may have neither end
        if not self.unreplicated:
            sizes.pop(COPIES, None)
        totals = {
            name: carried("all_gather", most_bytes=(TOTALS + METRIC_BYTES * self.num_metrics) * sizes[name])
            for name in ("data", "model")
        }
        traffic_by_axis = CARRIED | totals | {"cp": ATTENTION[self.context]}
        more_of_shards = carried("all_to_all") if self.subtrees else NOTHING
        for domain in DOMAINS.values():
            for name, more in zip(domain[:3], (OF_DOMAIN[0].combined(more_of_shards), *OF_DOMAIN[1:])):
                traffic_by_axis[name] = traffic_by_axis.get(name, NOTHING).combined(more)
        return {
            name: traffic_by_axis.get(name, NOTHING) if size > 1 else NOTHING for name, size in sizes.items()
        }


def axes_of(config: ResolvedConfig, table: Table, tied: bool, num_metrics: int = 0) -> Axes:
    """Return the axes of a layout. tied: the first and the last stage have the same embedding."""
    parallel = config.parallel
    ends = dict.fromkeys((table.rank_of[0], table.rank_of[table.depth - 1]))
    return Axes(
        grid=Grid({"tp": parallel.tp, "cp": parallel.cp, "dp": parallel.dp, "pp": parallel.pp}),
        divided=DOMAINS[DENSE].num_shards(config),
        repeats=max(1, parallel.tp // config.model.kv_heads),
        ends=tuple(ends) if tied else (),
        mirrored=table.copies == 2,
        matrices=optimizer_kind(config.optimizer).whole_matrices,
        context=parallel.context,
        num_metrics=num_metrics,
        folded=(parallel.ep, parallel.etp, DOMAINS[EXPERT].num_shards(config))
        if config.experts.count
        else None,
        near=near_ranks(config),
        partner=partner_of(config),
        subtrees=not division_of(config).is_even,
    )


def partner_of(config: ResolvedConfig) -> int:
    """Return the distance in ranks to the one that keeps a rank's copies; 0: none does.

    A layout that is compared with another one can have too few ranks for its partner.
    """
    partner = config.recovery.partner
    parallel = config.parallel
    num_ranks = parallel.dp * parallel.cp * parallel.tp * parallel.pp
    if partner == "auto" or not partner or num_ranks % partner:
        return 0
    return partner if partner < num_ranks else 0

"""Which ranks share an axis, for every axis of a layout. Integers only: no MPI and no torch."""

from collections.abc import Iterable
from typing import NamedTuple

from mpitrain.comm.grid import Grid, members
from mpitrain.config import Config
from mpitrain.schedules.table import Table


class Axes(NamedTuple):
    """What comm.mesh.Mesh is made of."""

    dense: Grid
    expert: Grid
    spans: dict[str, tuple[str, ...]]
    groups: dict[str, list[tuple[int, ...]]]

    def of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each axis that `rank` is on."""
        return members(rank, self.dense, self.expert, self.spans, self.groups)


def axes_of(config: Config, table: Table) -> Axes:
    """Return the axes of a layout."""
    dp, pp, tp, cp = config.parallel.dp, config.parallel.pp, config.parallel.tp, config.parallel.cp
    dense = Grid({"tp": tp, "cp": cp, "dp": dp, "pp": pp})
    ends = (table.rank_of[0], table.rank_of[table.depth - 1])
    muon = config.optimizer.name == "muon"
    repeats = max(1, tp // config.model.kv_heads)
    divided = cp * (config.parallel.dp_shard or dp) if config.parallel.zero else 1  # data ranks that divide the state among them

    def pairs(one: Iterable[int], other: Iterable[int]) -> list[tuple[int, ...]]:
        """Return pairs of pipeline ranks as pairs of world ranks, everywhere along the other axes."""
        along = [dense.group(rank, "pp") for rank in range(dense.size) if dense.coordinates(rank)["pp"] == 0]
        return [(ranks[a], ranks[b]) for ranks in along for a, b in zip(one, other) if a != b]

    data = {dense.group(rank, "cp", "dp") for rank in range(dense.size)}
    shards = [ranks[i : i + divided] for ranks in data for i in range(0, cp * dp, divided)]
    return Axes(
        dense,
        expert=Grid({"etp": 1, "ep": 1, "edp": tp * cp * dp, "pp": pp}),
        spans={"data": ("cp", "dp"), "links": ("pp",), "model": ("tp", "pp")},
        groups={
            "tied": pairs(ends[:1], ends[1:]) if config.model.tied else [],
            "mirror": pairs(range(pp // 2), range(pp)[::-1]) if table.copies == 2 else [],
            "shard": shards,
            "replicate": [ranks[i::divided] for ranks in data for i in range(divided)],
            "kv": [tuple(range(rank, rank + repeats)) for rank in range(0, dense.size, repeats)],  # neighbours in tp
            "matrix": [tuple(rank + i for i in range(tp) for rank in ranks) for ranks in shards if ranks[0] % tp == 0] if muon else [],
        },
    )

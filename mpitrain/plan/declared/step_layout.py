"""How a model is divided over ranks, and how it computes: what a prediction is asked about.

Rank order, fastest first: tp, cp, dp, pp for dense layers; etp, ep, edp, pp for experts
(docs/concepts/axes.md).
"""

from typing import Any, NamedTuple, Protocol

from mpitrain.schedules.catalog import FAMILIES, SIMPLEST, placement

MICROS = (1, 2, 4, 8)  # sequences of a microbatch that are tried
ITEM = {"fp32": 4, "fp64": 8}  # bytes of a number; all others have 2, in fp8 those between products, too


def item_of(dtype: str) -> int:
    """Return the bytes of a number between products that are computed in a type."""
    return ITEM.get(dtype, 2)


class ExpertLoad(Protocol):
    """How unevenly tokens load experts. source: who says so, in words."""

    @property
    def source(self) -> str: ...

    def on(self, layout: "StepLayout") -> float:
        """Return rows of the rank of ep whose experts have most, over the mean."""


class StepLayout(NamedTuple):
    """A layout of a step. compute, reduce, context, gather: as these keys of precision and parallel.

    batch: sequences of a step over all ranks. micro: of a microbatch. chunks: stages a rank.
    sharded: ranks that share the state of ZeRO; 0: all data ranks.
    wire_bytes, gradient_bytes: of a gradient's number on the wire, and where it is kept.
    flash: attention keeps no scores. fused: losses and activations are one kernel each (compile).
    overlapped: collectives of data ranks travel under computation. tp_overlap: those of tp, the
    share.
    offload_optimizer: master weights and moments are in host memory.
    segments: of each sequence, for a schedule that cuts it.
    dispatch: of experts: "alltoall", a copy for each expert; "hierarchical", one for each node;
    "allgather", every token to all ranks. hides_dispatch: it travels under another microbatch's
    computation (arXiv:2412.19437, section 3.2.1).
    narrow_gathers: with products in fp8, tp and ZeRO gather fp8.
    regathers: a backward gathers the input of tp's products again instead of keeping it whole,
    where it can.
    again: share of products that selective recomputation runs again. core_again: it runs attention
    proper again though no scores are kept.
    stages: blocks of each, as pipeline.stages; None: balanced.
    longest: microbatches of the data rank that has most; 0: all have as many.
    expert_load: as stated or replayed; None: as it is estimated for a machine. capacity: rows that
    an expert takes of a rank's, over the mean; 0: all. awaits: how long a host takes for each
    kernel that it launches after it has waited for the number of experts' rows, over a launch; 0:
    their number is fixed.
    """

    ranks: int
    sequence: int
    batch: int
    micro: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    chunks: int = 1
    sharded: int = 0
    zero: int = 1
    schedule: str = SIMPLEST
    recompute: str = "none"
    compute: str = "bf16"
    sequence_parallel: bool = True
    wire_bytes: int = 4
    gradient_bytes: int = 4
    flash: bool = True
    fused: bool = True
    overlapped: bool = True
    tp_overlap: float = 0.0
    dispatch: str = "alltoall"
    hides_dispatch: bool = False
    narrow_gathers: bool = False
    stages: tuple[float, ...] | None = None
    offload_optimizer: bool = False
    offload_activations: bool = False
    again: float = 0.0
    core_again: bool = False
    regathers: bool = True
    segments: int = 1
    reduce: str = "auto"
    context: str = "zigzag"
    gather: str = "auto"
    expert_load: ExpertLoad | None = None
    capacity: float = 0.0
    awaits: float = 1.0
    longest: int = 0

    @property
    def item(self) -> int:
        """Bytes of an activation, and of a weight that is computed with."""
        return item_of(self.compute)

    @property
    def gathers_fp8(self) -> bool:
        """Whether what is gathered for products, inputs by tp and weights by ZeRO, is fp8."""
        return self.narrow_gathers and self.compute == "fp8"

    @property
    def offloaded(self) -> str:
        """What is in host memory, as memory.offload says it."""
        if self.offload_optimizer:
            return "all" if self.offload_activations else "optimizer"
        return "activations" if self.offload_activations else "none"

    @property
    def sums_each(self) -> bool:
        """Whether gradients are summed over data ranks after each microbatch (plan/settings/resolve.py)."""
        return self.zero >= 2 if self.reduce == "auto" else self.reduce == "microbatch"

    @property
    def can_regather(self) -> bool:
        """Whether something is gathered over tp, as a whole, that nothing else gathers again."""
        gathers = self.tp > 1 and self.sequence_parallel and not self.tp_overlap
        return gathers and self.recompute != "full"

    @property
    def repeats_core(self) -> bool:
        """Whether selective recomputation runs attention again: not where it is a segment of its own."""
        alone = self.cp > 1 or (self.tp > 1 and self.tp_overlap > 0)
        return self.recompute == "selective" and (not self.flash or (self.core_again and not alone))

    @property
    def dp(self) -> int:
        return self.ranks // (self.tp * self.cp * self.pp)

    @property
    def edp(self) -> int:
        """Ranks that have the same experts."""
        return self.ranks // (self.etp * self.ep * self.pp)

    def divided_evenly(self, **fields: Any) -> "StepLayout":
        """Return the layout with other degrees or another batch, of which each data rank has as much."""
        return self._replace(longest=0, **fields)

    @property
    def num_microbatches(self) -> int:
        return self.longest or -(-self.batch // (self.dp * self.micro))

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The pipeline rank of each stage of one copy; of a user's own schedule, as of the simplest."""
        name = self.schedule if self.schedule in FAMILIES else SIMPLEST
        return placement(name, self.pp, self.chunks)[: self.pp * self.chunks]

    @property
    def positions(self) -> int:
        """Positions of a microbatch that one rank of tp attends for."""
        return self.micro * self.sequence // self.cp

    @property
    def stream_positions(self) -> int:
        """Positions of the residual stream on one rank."""
        return self.positions // (self.tp if self.sequence_parallel else 1)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence

    @property
    def shards(self) -> int:
        """Ranks that the state of dense weights is divided over."""
        return (self.sharded or self.dp * self.cp) if self.zero else 1

    @property
    def expert_shards(self) -> int:
        return max(1, min(self.shards, self.edp)) if self.zero else 1

    def describe(self) -> str:
        """Return the layout in a few words."""
        axes = (("tp", self.tp), ("cp", self.cp), ("pp", self.pp), ("ep", self.ep), ("etp", self.etp))
        words = [f"dp {self.dp}", *(f"{name} {size}" for name, size in axes if size > 1)]
        words += [f"chunks {self.chunks}"] * (self.chunks > 1)
        words += [self.schedule] * (self.pp > 1)
        words += [f"context {self.context}"] * (self.cp > 1 and self.context != "zigzag")
        words += [f"zero {self.zero}"]
        words += ["gather step"] * (self.zero == 3 and self.gather == "step")
        words += [f"offload {self.offloaded}"] * (self.offload_optimizer or self.offload_activations)
        words += [f"dp_shard {self.sharded}"] * (self.sharded > 0)
        words += [f"micro {self.micro}"]
        words += [f"recompute {self.recompute}"] * (self.recompute != "none")
        words += ["regather"] * (self.regathers and self.can_regather)
        return " ".join(words)

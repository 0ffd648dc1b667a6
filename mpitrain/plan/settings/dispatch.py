"""How rows travel to the experts of a layout: over which ranks, in which form, and how many are expected.

Integers and names only.

    flat          for each of its experts a row of the token goes to the rank that has it
    hierarchical  one row of the token goes to each node that has some of its experts, to the rank
                  with the same place there; that rank sends copies on inside the node. On the way
                  back it adds up what they make of the token, and one row crosses

The experts axis, M nodes of N neighbours each, is two axes then: experts_far (M ranks) and
experts_near (N ranks). DeepSeek-V3 does so between InfiniBand and NVLink (arXiv:2412.19437, section
3.2.2). The result is the same but for the order in which a token's experts are added: those of
a node first.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec

from mpitrain.config import Comm, with_values
from mpitrain.errors import ConfigError
from mpitrain.plan.declared.resolved import ResolvedConfig, ResolvedExperts
from mpitrain.plan.declared.traffic import Started, Traffic
from mpitrain.plan.settings.experts import open_to_token, positions, rows_at_once
from mpitrain.plan.settings.job_ranks import JobRanks

BLOCK = 128  # features of a row in fp8 that share a scale (DeepSeek-V3, section 3.3.2)
BF16 = "bf16"
FP8 = "fp8"


class Forms(NamedTuple):
    """What numbers are rounded to on their way to the experts and back.

    dispatch, combine: as experts.wire, "" for not at all.
    """

    dispatch: str
    combine: str


def resolve_dispatch(config: ResolvedConfig, ranks: JobRanks) -> tuple[ResolvedExperts, Comm]:
    """Fill in `experts.dispatch`, and with it the nodes. config: resolved but for these.

    Raises ConfigError for what can't be, and for what would do nothing.
    """
    experts, parallel = config.experts, config.parallel
    if not experts.count:
        return experts, config.comm
    obstacle = obstacle_to_nodes(parallel.ep, parallel.etp, ranks)
    if experts.dispatch == "hierarchical" and obstacle:
        raise ConfigError(f'experts.dispatch = "hierarchical": {obstacle}; use "flat" or "auto"')
    if experts.dispatch == "flat" or obstacle:
        return msgspec.structs.replace(experts, dispatch="flat"), config.comm
    config = with_values(config, {"experts.dispatch": "hierarchical", "comm.node_ranks": ranks.node_ranks})
    dispatch = Dispatch(config)
    if dispatch.tokens_at_once < 1:
        raise ConfigError(
            f"experts.buffer = {experts.buffer}: a rank that passes on one token needs {dispatch.copies} "
            f'rows at once, it has {dispatch.limit}; raise it, or use experts.dispatch = "flat"'
        )
    return config.experts, config.comm


def obstacle_to_nodes(ep: int, etp: int, job: JobRanks) -> str:
    """Say why rows of experts can't go to nodes first, or nothing."""
    ranks, node_ranks = ep * etp, job.node_ranks
    spread = f"parallel.ep x parallel.etp = {ep} x {etp}"
    if job.num_nodes == 1:
        return "all ranks are on one node"
    if not node_ranks:
        return "nodes have different numbers of ranks, or ranks of one node aren't neighbours"
    if node_ranks % ranks == 0:
        return f"the {ranks} ranks of {spread} are on one node, of {node_ranks}"
    if ranks % node_ranks:
        return f"{spread} = {ranks} ranks are no whole number of nodes, of {node_ranks} ranks each"
    if node_ranks % etp:
        return f"parallel.etp = {etp} divides an expert over several nodes, of {node_ranks} ranks each"
    return ""


def near_ranks(config: ResolvedConfig) -> int:
    """Return how many ranks of the experts axis a node has, if rows go to nodes first; else 0."""
    ranks = config.parallel.ep * config.parallel.etp
    return config.comm.node_ranks if config.experts.dispatch == "hierarchical" and ranks > 1 else 0


@dataclass(frozen=True)
class Dispatch:
    """How the rows of a resolved configuration travel. segments: of each sequence."""

    config: ResolvedConfig
    segments: int = 1

    @property
    def ranks(self) -> int:
        return self.config.parallel.ep * self.config.parallel.etp

    @cached_property
    def near(self) -> int:
        return near_ranks(self.config)

    @property
    def nodes(self) -> int:
        return self.ranks // self.near if self.near else 1

    @property
    def tokens(self) -> int:
        """Positions of a microbatch on a rank."""
        return self.config.batch.micro * positions(self.config, self.config.parallel) // self.segments

    @property
    def limit(self) -> int:
        """Rows that a rank holds at once, as the rank of experts, and as one that sends on in its node."""
        return rows_at_once(self.config, self.segments)

    @property
    def columns(self) -> int:
        """How many of a token's experts can be on one node."""
        return min(self.config.experts.active, self.config.experts.count // self.nodes)

    @property
    def copies(self) -> int:
        """How many rows the rank that passes a token on can have to send for it."""
        return self.columns * self.config.parallel.etp

    @property
    def tokens_at_once(self) -> int:
        """Tokens of one rank, of a round of a hierarchical exchange: their rows fit wherever they go."""
        return min(self.tokens, self.limit // self.copies)

    @property
    def blocks(self) -> int:
        """How many times `tokens_at_once` a rank has."""
        return -(-self.tokens // self.tokens_at_once)

    def forms(self, itemsize: int) -> Forms:
        """Return what numbers of `itemsize` bytes become. Back only to bf16: what comes back is added up."""
        wire = self.config.experts.wire
        return Forms(wire, BF16 if wire and itemsize > 2 else "")

    def traffic(self, width: int, itemsize: int) -> Traffic:
        """Return what is sent: counts, and rows as if tokens chose evenly among the experts open to them."""
        if self.ranks == 1:
            return Traffic()
        wide, experts, forms = max(4, itemsize), self.config.experts, self.forms(itemsize)
        there = num_bytes(forms.dispatch, width, itemsize)
        back = num_bytes(forms.combine, width, itemsize)
        counted = experts.count if not self.near else self.blocks * (experts.count + self.nodes)
        counts = Started("all_gather", "experts", self.ranks * counted * 8)
        axis, size = ("experts_near", self.near) if self.near else ("experts", self.ranks)
        exchanges = self._exchanges(axis, size, [there + wide, back, there, back + wide])
        if not self.near:
            return Traffic((counts, *exchanges[:2]), tuple(exchanges[2:]))
        crossing = self._expected_crossings()
        many = self.columns
        extra_bytes = [many * (wide + 4), 0, many * 4, many * wide]
        far = [
            Started("all_to_all_v", "experts_far", crossing * (a + b))
            for a, b in zip((there, back, there, back), extra_bytes)
        ]
        return Traffic((counts, far[0], *exchanges[:2], far[1]), (far[2], *exchanges[2:], far[3]))

    def _exchanges(self, axis: str, size: int, of_row: list[int]) -> list[Started]:
        """Return the exchanges with the other ranks of an axis, none if there are no others.

        A row goes to each rank that has a part of one of its experts.
        of_row: bytes of a row in each exchange.
        """
        away = self.tokens * self.config.experts.active * self.config.parallel.etp * (size - 1) // size
        return [Started("all_to_all_v", axis, away * row_bytes) for row_bytes in of_row] if size > 1 else []

    def _expected_crossings(self) -> int:
        """Rows that a rank sends to other nodes."""
        experts = self.config.experts
        per_node = experts.count // self.nodes
        size = experts.count // experts.groups
        open_ = open_to_token(experts)
        if self.nodes % experts.groups == 0 or experts.groups % self.nodes == 0:
            here = max(1, experts.groups // self.nodes)  # groups with experts on a node
            ways = [
                math.comb(here, n) * math.comb(experts.groups - here, experts.groups_active - n)
                for n in range(here + 1)
            ]
            missed = [math.comb(open_ - min(per_node, n * size), experts.active) for n in range(here + 1)]
            hit = [1 - ways_past / math.comb(open_, experts.active) for ways_past in missed]
            chance = sum(a * b for a, b in zip(ways, hit)) / math.comb(experts.groups, experts.groups_active)
        else:
            chance = 1 - math.comb(experts.count - per_node, experts.active) / math.comb(
                experts.count, experts.active
            )
        return round(self.tokens * (self.nodes - 1) * chance)


def num_bytes(form: str, width: int, itemsize: int) -> int:
    """Return the bytes of a row of `width` numbers in a form."""
    return width + 4 * -(-width // BLOCK) if form == FP8 else width * (2 if form == BF16 else itemsize)

"""What keys of recovery decide: the rank that keeps a copy on another node, the transport where ranks
may die, and how many data ranks are left.
"""

import msgspec

from mpitrain.config import Comm, Config, RecoveryTable
from mpitrain.errors import ConfigError, counted
from mpitrain.plan.settings.job_ranks import JobRanks


def resolve_recovery(recovery: RecoveryTable, ranks: JobRanks) -> RecoveryTable:
    """Return the table with a number for its partner: the distance in ranks; 0: there is none."""
    if not recovery.every:
        return recovery  # a partner that is set is refused as idle
    partner = recovery.partner
    if partner == "auto":
        uneven = ranks.num_nodes > 1 and (not ranks.node_ranks or ranks.size % ranks.node_ranks)
        if uneven and recovery.shrink:  # a rank was lost, or a node
            return msgspec.structs.replace(recovery, partner=0)
        if uneven:
            raise ConfigError(
                f"recovery.every = {recovery.every}: found {counted(ranks.size, 'ranks')} on "
                f"{counted(ranks.num_nodes, 'nodes')} with different numbers of them, needed as "
                "many on each, side by side; start as many on each, or leave recovery.every out"
            )
        partner = ranks.node_ranks if ranks.num_nodes > 1 else 0
    if partner and (ranks.size % partner or partner == ranks.size):
        raise ConfigError(
            f"recovery.partner = {partner} of {counted(ranks.size, 'ranks')}: found no whole number of "
            'nodes above 1, each of so many ranks; use "auto", or 0 for none'
        )
    return msgspec.structs.replace(recovery, partner=partner)


def with_spares(comm: Comm, recovery: RecoveryTable) -> Comm:
    """Return the table with the transport that a rank's death leaves usable, if a run may survive it."""
    if (recovery.spares or recovery.shrink) and comm.transport == "auto":
        return msgspec.structs.replace(comm, transport="messages")
    return comm


def ranks_left(config: Config, num_ranks: int) -> int:
    """Return how many data ranks a run has that may have lost some: parallel.dp at most.

    Raises ConfigError unless it is known how many it begins with.
    """
    parallel = config.parallel
    if not (parallel.dp and config.batch.global_):
        raise ConfigError(
            f"recovery.shrink = true: found parallel.dp = {parallel.dp} and batch.global = "
            f"{config.batch.global_}, needed what the run has with all its ranks; set both"
        )
    replica = ranks_of_replica(config)
    if num_ranks % replica:
        return parallel.dp
    return max(1, min(parallel.dp, num_ranks // replica))


def ranks_of_replica(config: Config) -> int:
    """Return how many ranks have one copy of the model together."""
    parallel = config.parallel
    return parallel.tp * parallel.cp * max(parallel.pp, 1)

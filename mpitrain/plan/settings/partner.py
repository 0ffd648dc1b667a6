"""What keys of recovery decide: the rank that keeps a copy on another node, and the transport with spares."""

import msgspec

from mpitrain.config import Comm, RecoveryTable
from mpitrain.errors import ConfigError


def resolve_recovery(
    recovery: RecoveryTable, num_ranks: int, num_nodes: int, node_ranks: int
) -> RecoveryTable:
    """Return the table with a number for its partner: the distance in ranks; 0: there is none.

    node_ranks: neighbours on each node, 0 if nodes differ.
    """
    partner = recovery.partner
    if not recovery.every:
        return recovery  # a partner that is set is refused as idle
    if partner == "auto":
        if num_nodes > 1 and (not node_ranks or num_ranks % node_ranks):
            raise ConfigError(
                f"recovery.every = {recovery.every}: found {num_ranks} ranks on {num_nodes} nodes with "
                "different numbers of them, needed as many on each, side by side; start as many on each, or "
                "leave recovery.every out"
            )
        partner = node_ranks if num_nodes > 1 else 0
    if partner and (num_ranks % partner or partner == num_ranks):
        raise ConfigError(
            f"recovery.partner = {partner} of {num_ranks} ranks: found no whole number of nodes above 1, "
            'each of so many ranks; use "auto", or 0 for none'
        )
    return msgspec.structs.replace(recovery, partner=partner)


def with_spares(comm: Comm, recovery: RecoveryTable) -> Comm:
    """Return the table with the transport that a rank's death leaves usable, where spares replace ranks."""
    if recovery.spares and comm.transport == "auto":
        return msgspec.structs.replace(comm, transport="messages")
    return comm

"""Put messages between the computations of a table."""

from collections.abc import Iterable

from mpitrain.schedules.actions import PAIR, RECV_B, RECV_F, SEND_B, SEND_F, Action
from mpitrain.schedules.table import Table


def with_messages(table: Table) -> list[list[Action]]:
    """Put the receive before each action that needs a message and the send after each that makes one.

    Of a pair both receives come first and both sends last, so that nothing interrupts it.
    """
    return [_with_messages(table, actions) for actions in table.ranks]


def _with_messages(table: Table, actions: Iterable[Action]) -> list[Action]:
    program: list[Action] = []
    rest = iter(actions)
    for action in rest:
        group = [next(rest), next(rest)] if action == PAIR else [action]
        messages = [_messages(table, member) for member in group]
        program += [receive for receive, _ in messages if receive]
        program += [PAIR, *group] if action == PAIR else group
        program += [send for _, send in messages if send]
    return program


def _messages(table: Table, action: Action) -> tuple[Action | None, Action | None]:
    """Return the receive that a computation needs and the send of what it makes."""
    kind, m, stage, _ = action
    rank_of, in_copy = table.rank_of, stage % table.depth
    previous = in_copy > 0 and rank_of[stage - 1] != rank_of[stage]
    following = in_copy + 1 < table.depth and rank_of[stage + 1] != rank_of[stage]
    if kind == "F":
        return RECV_F(m, stage) if previous else None, SEND_F(m, stage) if following else None
    if kind in ("B", "I"):
        return RECV_B(m, stage) if following else None, SEND_B(m, stage) if previous else None
    return None, None

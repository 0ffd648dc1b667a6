"""Put messages between the computations of a table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from mpitrain.schedules.actions import PAIR, RECV_B, RECV_F, SEND_B, SEND_F, Action
from mpitrain.schedules.pairs import grouped, part_by_part
from mpitrain.schedules.table import Table


def with_messages(table: Table, num_parts: Sequence[int] | None = None) -> list[list[Action]]:
    """Put the receive before each action that needs a message and the send after each that makes one.

    Both receives of a pair come first and both sends last: nothing interrupts it. With `num_parts`,
    of each stage, pairs are walked in parts; a send stands right after the last part of what makes
    it.
    """
    return [_with_messages(table, actions, num_parts) for actions in table.ranks]


def _with_messages(table: Table, actions: Iterable[Action], num_parts: Sequence[int] | None) -> list[Action]:
    program: list[Action] = []
    for group in grouped(actions):
        members = [action for action in group if action != PAIR]
        messages = [messages_of(table, member) for member in members]
        program += [receive for receive, _ in messages if receive]
        sends = {member: send for member, (_, send) in zip(members, messages) if send}
        if num_parts and PAIR in group:
            forward, backward = members
            program += _in_parts(forward, backward, sends, num_parts)
        else:
            program += [*group, *sends.values()]
    return program


def _in_parts(
    forward: Action, backward: Action, sends: Mapping[Action, Action], num_parts: Sequence[int]
) -> Iterator[Action]:
    last = {member._replace(part=num_parts[member.stage] - 1): send for member, send in sends.items()}
    for group in part_by_part(forward, backward, num_parts):
        yield from group
        yield from (last[part] for part in group if part in last)


def messages_of(table: Table, action: Action) -> tuple[Action | None, Action | None]:
    """Return the receive that a computation needs and the send of what it makes."""
    kind, m, stage, _ = action
    rank_of = table.rank_of
    in_copy = stage % table.depth
    previous = in_copy > 0 and rank_of[stage - 1] != rank_of[stage]
    following = in_copy + 1 < table.depth and rank_of[stage + 1] != rank_of[stage]
    if kind == "F":
        return RECV_F(m, stage) if previous else None, SEND_F(m, stage) if following else None
    if kind in ("B", "I"):
        return RECV_B(m, stage) if following else None, SEND_B(m, stage) if previous else None
    return None, None

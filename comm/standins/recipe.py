"""What a rank does in a step as far as others notice: events of a rehearsal, for a dry run.

    At     the rank comes to an instruction of its program
    Start  it starts an operation on an axis; operations are numbered from 0 in the order in which
           they are started
    Wait   it waits for an operation; a negative number is one of the step before, -1 its last

Plain values, for another process to walk: encoded() and decoded() are inverse.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from mpitrain.comm.links import Message


class At(NamedTuple):
    """The instruction at `position` of the program comes next."""

    position: int
    instruction: str


class Start(NamedTuple):
    """An operation is started. num_bytes: of its buffer, as comm/base/wire.py counts it.

    message: of a send or a receive.
    """

    axis: str
    operation: str
    num_bytes: int
    message: Message | None = None


class Wait(NamedTuple):
    """Operation `number` has to be complete."""

    number: int


Event = At | Start | Wait
KINDS: tuple[type[Event], ...] = (At, Start, Wait)


def encoded(events: Iterable[Event]) -> list[list[Any]]:
    """Return events as lists of numbers, texts and lists."""
    return [[KINDS.index(type(event)), *event] for event in events]


def decoded(found: Iterable[list[Any]]) -> list[Event]:
    """Return the events that encoded() was given."""
    return [_event(KINDS[kind], fields) for kind, *fields in found]


def _event(kind: type[Event], fields: list[Any]) -> Event:
    if kind is Start and fields[3] is not None:
        fields[3] = Message(*fields[3])
    return kind(*fields)

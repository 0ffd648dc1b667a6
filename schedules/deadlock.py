"""Find and explain a deadlock."""

from mpitrain.schedules.actions import Action
from mpitrain.schedules.needs import Needs, Place, partner
from mpitrain.schedules.rules import Flaw
from mpitrain.schedules.simulate import play


def no_deadlock(needs: Needs, *, blocking_sends: bool = False) -> None:
    """Play all ranks to their end. Raises a Flaw that names each rank of a cycle of waits.

    The programs must obey the other rules: a rank then only ever waits for the other end of a message.
    """
    _, cursors = play(needs, blocking_sends=blocking_sends)
    stuck = [rank for rank, program in enumerate(needs.programs) if cursors[rank] < len(program)]
    if not stuck:
        return
    chain = _cycle(needs, cursors, stuck[0])
    waits = [f"{place}: {action} waits for {need} ({needs.place[need]})" for place, action, need in chain]
    raise Flaw(chain[0][0], "deadlock, each rank waits for the next:\n  " + "\n  ".join(waits))


def _cycle(needs: Needs, cursors: list[int], rank: int) -> list[tuple[Place, Action, Action]]:
    """Follow the waits from a stuck rank until they come back; return (place, action, what it waits for) of that cycle."""
    path: dict[int, tuple[Place, Action, Action]] = {}
    while rank not in path:
        action = needs.programs[rank][cursors[rank]]
        need = partner(action)
        path[rank] = (Place(rank, cursors[rank]), action, need)
        rank = needs.place[need].rank
    ranks = list(path)
    return [path[member] for member in ranks[ranks.index(rank) :]]

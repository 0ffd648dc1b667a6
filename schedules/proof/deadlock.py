"""Find and explain a deadlock."""

from collections import defaultdict, deque

from mpitrain.schedules.actions import RECEIVES, SENDS, Action
from mpitrain.schedules.lowering.needs import ActionPlace, Needs, partner
from mpitrain.schedules.proof.rules import Flaw


def no_deadlock(needs: Needs, *, blocking_sends: bool = False) -> None:
    """Play all ranks to their end. Raises a Flaw that names each rank of a cycle of waits.

    The programs must obey the other rules: a rank then only ever waits for the other end of a
    message, or of a sum.
    """
    cursors = play(needs, blocking_sends=blocking_sends)
    stuck = [rank for rank, program in enumerate(needs.programs) if cursors[rank] < len(program)]
    if not stuck:
        return
    chain = _cycle(needs, cursors, stuck[0])
    waits = [f"{place}: {action} waits for {need} ({needs.place[need]})" for place, action, need in chain]
    raise Flaw(chain[0][0], "deadlock, each rank waits for the next:\n  " + "\n  ".join(waits))


def _cycle(needs: Needs, cursors: list[int], rank: int) -> list[tuple[ActionPlace, Action, Action]]:
    """Return (place, action, what it waits for) of the cycle that a stuck rank's waits lead to."""
    path: dict[int, tuple[ActionPlace, Action, Action]] = {}
    while rank not in path:
        action = needs.programs[rank][cursors[rank]]
        need = (needs.met(action) or [partner(action)])[0]
        path[rank] = (ActionPlace(rank, cursors[rank]), action, need)
        rank = needs.place[need].rank
    ranks = list(path)
    return [path[member] for member in ranks[ranks.index(rank) :]]


def play(needs: Needs, *, blocking_sends: bool = False) -> list[int]:
    """Run the programs until none can continue; return each rank's cursor.

    Nothing is buffered: sends are started without blocking (MPI_Isend), and complete when the
    receive is reached; receives block. With `blocking_sends` a send blocks until then, too. Sums
    are started without blocking; what takes the result of one blocks until every rank has started
    it. What can run doesn't depend on who goes first. A cursor short of its program's end means
    deadlock.
    """
    cursors = [0] * len(needs.programs)
    done: set[Action] = set()
    ready = deque(range(len(cursors)))
    # ranks, by what they wait for: that it is done, or a receive is reached
    waiting: dict[Action, list[int]] = defaultdict(list)

    def missing(action: Action) -> Action | None:
        """Return what an action waits for, if it can't run yet."""
        for need in (*needs.of(action), *needs.met(action)):
            if need not in done:
                return need
        if blocking_sends and action.kind in SENDS and (receive := partner(action)) in needs.place:
            rank, position = needs.place[receive]
            return receive if position > cursors[rank] else None
        return None

    while ready:
        rank = ready.popleft()
        program = needs.programs[rank]
        while cursors[rank] < len(program):
            action = program[cursors[rank]]
            if action.kind in RECEIVES:
                ready.extend(waiting.pop(action, ()))
            if (need := missing(action)) is not None:
                waiting[need].append(rank)
                break
            done.add(action)
            cursors[rank] += 1
            ready.extend(waiting.pop(action, ()))
    return cursors

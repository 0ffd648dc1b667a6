"""Which stashes of an order are recomputed or offloaded to keep a memory limit.

A forward without room drops, of what its rank holds, what has its backward last: with stashes of
one size no other choice recomputes fewer (Belady 1966). A dropped stash is made again right before
its backward, by a forward more; a stage's input is kept. Where that is shorter, a stash is
offloaded: to host memory beside its forward, back beside its backward.
"""

from mpitrain.schedules.search.problem import (
    AGAIN,
    DROPPED,
    FETCHED,
    FETCHED_WHOLE,
    FORWARD,
    INPUT,
    SENT,
    WEIGHT,
    WHOLE,
    Problem,
)
from mpitrain.schedules.search.timed_order import Order

Key = tuple[int, int]  # stage, microbatch


def recomputed(problem: Problem, order: Order) -> Order | None:
    """Return an order with what has to be recomputed within the limit; None: it doesn't fit even so.

    order: of whole stashes. Where W isn't in it, I ends a stash: W goes where room is needed.
    """
    rows = [_Row(problem, row) for row in order]
    return [row.result for row in rows] if all(row.fits for row in rows) else None


class _Row:
    def __init__(self, problem: Problem, order: list[tuple[int, int, int]]):
        self.problem = problem
        self.held = 0.0
        self.result: list[tuple[int, int, int]] = []
        self.backwards = {
            (stage, m): place for place, (kind, stage, m) in enumerate(order) if kind in (INPUT, WHOLE)
        }
        self.forwards: dict[Key, int] = {}  # of stashes that may be dropped: where they stand in the result
        self.dropped: set[Key] = set()
        self.sent: set[Key] = set()
        self.has_weights = any(kind == WEIGHT for kind, _, _ in order)
        self.fits = all(self._take(*step) for step in order)

    def _take(self, kind: int, stage: int, m: int) -> bool:
        """Add a computation; return whether it fits."""
        key = stage, m
        if kind == FORWARD:
            self.forwards[key] = len(self.result)
            self.result.append((kind, stage, m))
            self.held += 1
            return self._make_room(key if self.problem.offloads[stage] else None)
        if kind != WEIGHT:
            self.forwards.pop(key, None)
            if key in self.dropped:
                self.held += self.problem.changes[AGAIN]
                if not self._make_room():
                    return False
                self.result.append((AGAIN, stage, m))
            elif key in self.sent:
                kind = FETCHED if kind == INPUT else FETCHED_WHOLE
                self.held += 1
                if not self._make_room():
                    return False
                self.held -= 1
        self.result.append((kind, stage, m))
        self.held += self.problem.changes[kind]
        if kind in (INPUT, FETCHED) and not self.has_weights:
            self.held -= self.problem.late
        return True

    def _make_room(self, running: Key | None = None) -> bool:
        """Free stashes until what is held fits. running: the stash of a forward that runs."""
        limit = self.problem.limit + 1e-9
        while self.held > limit:
            held = [key for key in self.forwards if key != running]
            if not held:
                return False
            key = max(held, key=self.backwards.__getitem__)
            place = self.forwards.pop(key)
            if self.problem.offloads[key[0]]:
                self.result[place] = SENT, *key
                self.sent.add(key)
                self.held -= 1
            else:
                self.result[place] = DROPPED, *key
                self.dropped.add(key)
                self.held -= self.problem.changes[AGAIN]
        return True

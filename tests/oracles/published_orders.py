"""Orders of others' generators, written anew from their papers and public sources, and a player of orders.

`grouped`, `v_1f1b`, `v_blocks`, `zero_bubble` and `zero_bubble_v` are what
sail-sg/zero-bubble-pipeline-parallelism makes (arXiv:2401.10241, arXiv:2405.15362); PyTorch's generators run
from its package (torch_tables.py).

An order has a row for each rank, of (kind, stage, microbatch): F, I for the backward for inputs, W for the
one for weights, B for both in one.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import permutations, product
from typing import NamedTuple

Op = tuple[str, int, int]
Order = list[list[Op]]
PERIOD = 6


class DoesNotFit(Exception):
    """A plan has no room for its next operation, or nothing to put there."""


class Times(NamedTuple):
    """Of one stage, by its number; a message is between stages of two ranks."""

    F: list[float]
    I: list[float]
    W: list[float]
    message: float

    def of(self, kind: str, stage: int) -> float:
        return self.I[stage] + self.W[stage] if kind == "B" else getattr(self, kind)[stage]


def played(order: Order, times: Times) -> tuple[float, list[list[tuple[Op, float]]]]:
    """Return the makespan and each rank's (operation, end), each started as early as its needs allow."""
    rank_of = {stage: rank for rank, row in enumerate(order) for _, stage, _ in row}
    last = len(rank_of) - 1
    ends: dict[Op, float] = {}
    rows: list[list[tuple[Op, float]]] = [[] for _ in order]

    def ready(op: Op) -> float | None:
        kind, stage, m = op
        if kind == "W" or (kind == "F" and stage == 0):
            return 0.0
        if kind != "F" and stage == last:
            return ends.get(("F", stage, m))
        other = stage - 1 if kind == "F" else stage + 1
        before = ends.get(("F" if kind == "F" else "I", other, m))
        return None if before is None else before + times.message * (rank_of[other] != rank_of[stage])

    moved = True
    while moved:
        moved = False
        for row, done in zip(order, rows):
            while len(done) < len(row) and (arrival := ready(row[len(done)])) is not None:
                kind, stage, m = op = row[len(done)]
                end = max(arrival, done[-1][1] if done else 0.0) + times.of(kind, stage)
                done.append((op, end))
                ends["I" if kind == "B" else kind, stage, m] = end
                moved = True
    assert all(len(done) == len(row) for row, done in zip(order, rows)), "the order can't be played"
    return max(done[-1][1] for done in rows), rows


def peak(order: Order, late: float = 1.0) -> float:
    """Return the most stashes of one stage that a rank holds. late: the share of one between I and W."""
    change = {"F": 1, "I": late - 1, "W": -late, "B": -1}
    most = 0.0
    for row in order:
        held = 0.0
        for kind, _, _ in row:
            held += change[kind]
            most = max(most, held)
    return most


# ---------------------------------------------------------------- grouped interleaved (arXiv:2405.15362)


def grouped(p: int, m: int, chunks: int, group: int) -> Order:
    """Return grouped interleaved 1F1B: groups from p/2 on, each with F, I and W in three slots in turn."""
    slots: list[dict[int, Op]] = [{} for _ in range(p)]
    for number in range(m):
        round_, place = divmod(number, group)
        begin = 3 * (round_ * group * chunks + place)
        for chunk, rank in product(range(chunks), range(p)):
            own = slots[rank]
            own[begin + 3 * group * chunk + rank] = "F", chunk * p + rank, number
            # the last chunk's forward reaches the last rank, and its backward returns two slots a rank
            returns = begin + 3 * group * (chunks - 1) + p - 1 + 1 + 2 * (p - 1 - rank)
            stage = (chunks - 1 - chunk) * p + rank
            own[returns + 3 * group * chunk] = "I", stage, number
            own[returns + 3 * group * chunk + 1] = "W", stage, number
    return [[own[slot] for slot in sorted(own)] for own in slots]


# ---------------------------------------------------------------- V of stages, in letters: F f B b W w

NEXT = {"F": 0, "f": 1, "B": 2, "b": 3}
Grid = list[list[str]]


def _stage(letter: str, rank: int, p: int) -> int:
    return rank if letter in "Fbw" else 2 * p - 1 - rank


def _from_letters(grid: Grid, whole: bool = False) -> Order:
    """Return the order of a grid; a whole backward stands where its first half does."""
    p = len(grid)
    kind = {"F": "F", "f": "F", "B": "I", "b": "I", "W": "W", "w": "W"}
    if whole:
        kind |= {"B": "B", "b": "B"}
    rows: Order = []
    for rank, cells in enumerate(grid):
        seen: dict[str, int] = defaultdict(int)
        row = []
        for letter in cells:
            if letter != " " and not (whole and letter in "Ww"):
                # W of f's stage is W, of F's is w
                row.append((kind[letter], _stage({"W": "B"}.get(letter, letter), rank, p), seen[letter]))
                seen[letter] += 1
        rows.append(row)
    return rows


def _repeated(block: list[list[int]], m: int) -> Grid:
    """Repeat a block of slots for each microbatch. block: each rank's slots of F f B b W w, modulo six."""
    p = len(block)
    at: dict[tuple[str, int], int] = {}
    slot = 0
    for letter in "FfBb":
        for rank in range(p) if letter in "FB" else reversed(range(p)):
            slot += (block[rank]["FfBb".index(letter)] - slot) % PERIOD
            at[letter, rank] = slot
            slot += 1
            if letter in "Bb":
                late = block[rank]["FfBbWw".index({"B": "W", "b": "w"}[letter])]
                at[{"B": "W", "b": "w"}[letter], rank] = slot + (late - slot) % PERIOD
    length = max(at.values()) + PERIOD * m + 1
    grid = [[" "] * length for _ in range(p)]
    for (letter, rank), first in at.items():
        for number in range(m):
            grid[rank][first + PERIOD * number] = letter
    return grid


def _held(grid: Grid) -> list[int]:
    """Return the peak of each rank in a grid."""
    peaks = []
    for row in grid:
        held = most = 0
        for letter in row:
            held += (letter in "Ff") - (letter in "Ww")
            most = max(most, held)
        peaks.append(most)
    return peaks


def _squeezed(grid: Grid) -> Grid:
    """Take out slots in which all wait, keeping each rank's order."""
    p = len(grid)
    at: dict[tuple[str, int, int], int] = {}
    rows = [[letter for letter in row if letter != " "] for row in grid]
    seen = [dict.fromkeys("FfBbWw", 0) for _ in range(p)]
    cursors, free, result = [0] * p, [0] * p, [[] for _ in range(p)]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while cursors[rank] < len(row):
                letter = row[cursors[rank]]
                need = _need(letter, rank, seen[rank][letter], p)
                if need is not None and need not in at:
                    break
                slot = max(free[rank], at[need] + 1 if need else 0)
                at[letter, rank, seen[rank][letter]] = slot
                seen[rank][letter] += 1
                result[rank] += [" "] * (slot - len(result[rank])) + [letter]
                free[rank], cursors[rank], moved = slot + 1, cursors[rank] + 1, True
    if any(cursor < len(row) for cursor, row in zip(cursors, rows)):
        raise DoesNotFit
    length = max(map(len, result))
    return [row + [" "] * (length - len(row)) for row in result]


def _need(letter: str, rank: int, number: int, p: int) -> tuple[str, int, int] | None:
    """Return what must be done before a letter of a rank."""
    if letter in "Ww":
        return letter.translate({ord("W"): "B", ord("w"): "b"}), rank, number
    if letter in "FB":
        return (letter, rank - 1, number) if rank else ("f", 0, number) if letter == "B" else None
    return (letter, rank + 1, number) if rank < p - 1 else ({"f": "F", "b": "B"}[letter], rank, number)


# ---------------------------------------------------------------- 1F1B-V


def v_1f1b(p: int, m: int) -> Order:
    """Return 1F1B-V: two thirds of 1F1B's memory, whole backwards, the warmup pulled to the left."""
    block = [[0] * PERIOD for _ in range(p)]
    slot, turn = 2 * p + (3 if p % 3 == 0 else 0) + 1, (3 - (p + 2) % 3) % 3
    for rank in range(p):
        block[rank][0], block[p - 1 - rank][1] = 1 + rank, 1 + p + rank
    for column, ranks in ((2, range(p)), (3, reversed(range(p)))):
        for rank in ranks:
            block[rank][column], block[rank][column + 2] = slot, slot + 1
            turn, slot = (0, slot + 5) if turn == 2 else (turn + 1, slot + 2)
    grid = _repeated([[slot % PERIOD for slot in row] for row in block], m)
    return _from_letters(_pulled([[" "] * PERIOD + row for row in grid]), whole=True)


def _first(grid: Grid, m: int) -> Grid:
    """Keep the first microbatches."""
    result = []
    for row in grid:
        seen: dict[str, int] = defaultdict(int)
        kept = []
        for letter in row:
            seen[letter] += 1
            kept.append(letter if letter != " " and seen[letter] <= m else " ")
        result.append(kept)
    return result


def _pulled(grid: Grid) -> Grid:
    """Move each letter to the first free slot that its needs and the peak allow; B and W stay together."""
    p, peak_all = len(grid), max(_held(grid))
    at: dict[tuple[str, int, int], int] = {}
    seen = [dict.fromkeys("FfBbWw", 0) for _ in range(p)]
    held = [[0] * (len(grid[0]) + 1) for _ in range(p)]
    for rank, row in enumerate(grid):
        now = 0
        for slot, letter in enumerate(row):
            now += (letter in "Ff") - (letter in "Ww")
            held[rank][slot] = now
    for slot, rank in product(range(len(grid[0])), range(p)):
        row, letter = grid[rank], grid[rank][slot]
        if letter == " ":
            continue
        number = seen[rank][letter]
        seen[rank][letter] += 1
        need = _need(letter, rank, number, p)
        if need and letter in "Bb" and need[0] in "Bb":
            need = {"B": "W", "b": "w"}[need[0]], *need[1:]  # both halves are one
        first = max(at.get((letter, rank, number - 1), -1), at.get(need, -1) if need else -1) + 1
        if letter in "Ff":
            least = slot
            while least > first and held[rank][least - 1] < peak_all:
                least -= 1
            first = least
        while first < slot and (row[first] != " " or (letter in "Bb" and row[first + 1] != " ")):
            first += 1
        if first < slot:
            row[first], row[slot] = letter, " "
            for between in range(first, slot):
                held[rank][between] += (letter in "Ff") - (letter in "Ww")
        at[letter, rank, number] = first
    return grid


# ---------------------------------------------------------------- a V for a memory limit (v_auto_schedule.py)


def v_blocks(p: int) -> Iterator[list[list[int]]]:
    """Yield building blocks: slots of the first rank, and shifts from a rank to the next, of two kinds."""
    for first in permutations(range(1, PERIOD), 3):
        start = _with_weights([0, *first])
        for ahead, behind in product(range(1, PERIOD), repeat=2):
            for number in range(1, max(p, 2)) if behind < ahead else [p] * (behind == ahead):
                block = [start]
                for rank in range(p - 1):
                    shift = ahead if rank < number else behind
                    slots = [(s + d) % PERIOD for s, d in zip(block[-1], (shift, -1, shift, -1))]
                    if len(set(slots)) < 4:
                        break
                    block.append(_with_weights(slots))
                if len(block) == p:
                    yield block


def _with_weights(slots: list[int]) -> list[int]:
    """Give each W the first free slot after its B."""
    slots = list(slots)
    for column in (2, 3):
        slot = slots[column]
        while slot in slots:
            slot = (slot + 1) % PERIOD
        slots.append(slot)
    return slots


def v_from_block(block: list[list[int]], m: int, most: int) -> Order | None:
    """Repeat, squeeze and reorder a block (arXiv:2405.15362, appendix A); None: it doesn't fit.

    most: stashes of half a rank's layers.
    """
    p = len(block)
    number = max(m, 2 * p)
    grid = _repeated(block, number)
    limit = max(_held(grid))
    if limit > 2 * p or (m == number and limit > most):
        return None
    grid = _squeezed(_warmed_up(_squeezed(grid), number, limit))
    if max(_held(grid)) > limit:
        return None
    if m < number:
        grid = _first(grid, m)
        if m <= p and 2 * m <= most:
            grid = _later_weights(grid, min(2 * p, limit))
        grid = _squeezed(grid)
        limit = max(_held(grid))
        if limit > most:
            return None
    grid = _filled(_cooled_down(grid, m))
    grid = _relabelled(grid)
    if max(_held(grid)) > limit:
        return None
    return _from_letters(grid)


def _warmed_up(grid: Grid, m: int, limit: int) -> Grid:
    """Before each rank's first b: as many F as fit, then F and f in turn, then B, W, and one more."""
    p = len(grid)
    result = []
    for rank, row in enumerate(grid):
        until = row.index("b")
        left = {letter: row[:until].count(letter) for letter in "FfBW"}
        turned = min(rank + 1, limit // 2, m, left["f"])
        down = min(limit - min(rank + 1, limit // 2, m), m, left["F"])
        before = min(2 * (p - 1 - rank), down)
        begun = ["F"] * before
        for number in range(rank + 1):
            begun += ["F"] * (before + number < down) + ["f"] * (number < turned)
        rest = {"F": left["F"] - begun.count("F"), "f": left["f"] - begun.count("f")}
        for number in range(max(left["B"], left["W"], sum(rest.values()))):
            begun += ["B"] * (number < left["B"]) + ["W"] * (number < left["W"])
            begun += ["f"] if number < rest["f"] else ["F"] * (number < sum(rest.values()))
        result.append(begun + row[until:])
    length = max(map(len, result))
    return [row + [" "] * (length - len(row)) for row in result]


def _later_weights(grid: Grid, limit: int) -> Grid:
    """Put off the first W of ranks that have room: there are few microbatches."""
    result = []
    for row, held in zip(grid, _held(grid)):
        row, late = list(row), []
        for slot, letter in enumerate(row):
            if held + len(late) < limit and letter in "Ww":
                late.append(letter)
                row[slot] = " "
        result.append(row + late)
    length = max(map(len, result))
    return [row + [" "] * (length - len(row)) for row in result]


def _cooled_down(grid: Grid, m: int) -> Grid:
    """After the first rank's last f: B and b as tight as they can be, and W wherever there is room."""
    p, limit = len(grid), max(_held(grid))
    ups = min((limit + 1) // 2, m)
    downs = min(limit - ups, m)
    begin = max(slot for slot, letter in enumerate(grid[0]) if letter == "f")
    result = []
    for rank, row in enumerate(grid):
        row = row + [" "] * (4 * p + 2 * m)
        taken = dict.fromkeys("BbWw", 0)
        for slot in reversed(range(len(row))):
            if row[slot] == "B" and taken["B"] < min(rank + 1, downs):
                taken["B"], row[slot] = taken["B"] + 1, " "
            elif row[slot] == "b" and taken["b"] < ups:
                taken["b"], row[slot] = taken["b"] + 1, " "
        for slot in reversed(range(len(row))):
            if taken["W"] >= taken["B"] and taken["w"] >= taken["b"] and taken["W"] + taken["w"] >= limit:
                break
            if row[slot] in "Ww":
                taken[row[slot]] += 1
                row[slot] = " "
        for letter, last, number in (
            ("b", begin - rank + 2 * p, taken["b"]),
            ("B", begin + 1 + rank, taken["B"]),
        ):
            for back in range(number):
                if last - 2 * back < 0 or row[last - 2 * back] != " ":
                    return grid  # as it was
                row[last - 2 * back] = letter
        late, open_ = (
            dict.fromkeys("Ww", 0),
            max((slot for slot, letter in enumerate(row) if letter in "Ww"), default=-1),
        )
        for slot, letter in enumerate(row):
            if letter in "Bb":
                late["W" if letter == "B" else "w"] += 1
            elif letter in "Ww":
                late[letter] -= 1
            elif letter == " " and slot > open_ and (late["W"] or late["w"]):
                letter = "W" if late["W"] else "w"
                late[letter] -= 1
                row[slot] = letter
        result.append(row)
    try:
        return _squeezed(result)
    except DoesNotFit:
        return grid


def _filled(grid: Grid) -> Grid:
    """Fill each free slot with the first of what follows that can be there, unless the peak would rise."""
    p, limit, length = len(grid), max(_held(grid)), len(grid[0])
    at: dict[tuple[str, int, int], int] = {}
    seen = [dict.fromkeys("FfBbWw", 0) for _ in range(p)]
    held = [0] * p
    for slot, rank in product(range(length), range(p)):
        row = grid[rank]
        if row[slot] == " ":
            tried: set[str] = set()
            delta = most = 0
            for later in range(slot + 1, length):
                letter = row[later]
                before = most
                delta += (letter in "Ff") - (letter in "Ww")
                most = max(most, delta)
                if letter == " " or letter in tried:
                    continue
                tried.add(letter)
                need = _need(letter, rank, seen[rank][letter], p)
                early = need is None or at.get(need, slot) < slot
                if early and not (letter in "Ff" and held[rank] + before >= limit):
                    row[slot], row[later] = letter, " "
                    break
                if len(tried) == 6:
                    break
        if (letter := row[slot]) != " ":
            at[letter, rank, seen[rank][letter]] = slot
            seen[rank][letter] += 1
            held[rank] += (letter in "Ff") - (letter in "Ww")
    return grid


def _relabelled(grid: Grid) -> Grid:
    """Run W in the order of their B."""
    for row in grid:
        late: deque[str] = deque()
        for slot, letter in enumerate(row):
            if letter in "Bb":
                late.append("W" if letter == "B" else "w")
            elif letter in "Ww":
                row[slot] = late.popleft()
    return grid


# ---------------------------------------------------------------- automatic schedulers (arXiv:2401.10241)


class _Rank:
    """What a rank has done: the ends of each kind of operation, and what it waited."""

    def __init__(self, kinds: str):
        self.ends: dict[str, list[float]] = {kind: [] for kind in kinds}
        self.row: list[str] = []
        self.late: deque[str] = deque()
        self.now = self.waited = self.held = 0.0

    def run(self, letter: str, cost: float, arrival: float, change: float) -> None:
        begin = max(self.now, arrival)
        self.waited += begin - self.now if self.row else 0
        self.now = begin + cost
        self.held += change
        self.ends[letter].append(self.now)
        self.row.append(letter)


def zero_bubble(p: int, m: int, costs: tuple[float, float, float, float], limit: float, late: float) -> Order:
    """Return the best of eight greedy orders of a stage a rank, by the longest time of a rank."""
    plans = [_greedy(p, m, costs, limit, late, answers) for answers in product((True, False), repeat=3)]
    _, order = min(plans, key=lambda plan: plan[0])
    return order


def _greedy(p, m, costs, limit, late, answers) -> tuple[float, Order]:
    keep_first, inputs_first, never_wait = answers
    forward, grad, weight, message = costs
    cost = {"F": forward, "I": grad, "W": weight}
    change = {"F": 1.0, "I": late - 1, "W": -late}
    ranks = [_Rank("FIW") for _ in range(p)]

    def count(j: int, kind: str) -> int:
        return len(ranks[j].ends[kind])

    def arrival(j: int, kind: str) -> float:
        other = j - 1 if kind == "F" else j + 1
        if kind == "W" or not 0 <= other < p:
            return 0.0
        return ranks[other].ends[kind][count(j, kind)] + message

    def put(j: int, kind: str) -> None:
        ranks[j].run(kind, cost[kind], arrival(j, kind), change[kind])

    def fill(j: int, kind: str) -> None:
        """Run W until the message for the next of a kind is there."""
        rank, there = ranks[j], arrival(j, kind)
        while count(j, "W") < count(j, "I") and rank.now + weight <= there:
            put(j, "W")
        if count(j, "W") < count(j, "I") and rank.now < there:
            may_wait = there - rank.now <= max(one.waited for one in ranks) - rank.waited
            if never_wait or not may_wait:
                put(j, "W")

    for j in range(p):
        put(j, "F")
    more, returns = [0] * p, ranks[-1].now + grad
    for j in reversed(range(p - 1)):
        now = ranks[j].now
        while 1 + more[j] < m and ranks[j].held + more[j] + 1 <= limit:
            if (now + forward > returns + message) if keep_first else (now >= returns + message):
                break
            now += forward
            more[j] += 1
        returns = max(now, returns + message) + grad
    for j in range(1, p):
        while more[j] > 0 and more[j] >= more[j - 1] and 1 + more[j] < m:
            more[j] -= 1
    for j in range(p):
        for _ in range(more[j]):
            put(j, "F")
    for j in reversed(range(p)):
        put(j, "I")
    for _ in range(1, m):
        due = [False] * p
        for j in range(p):
            due[j] = count(j, "F") < m
            if due[j] and inputs_first and j + 1 < p and count(j, "F") >= count(j + 1, "F") + 2:
                rank, other = ranks[j], ranks[j + 1]
                needed_at = other.now + forward + grad + message
                freed = 0
                while rank.held + 1 - freed * late > limit and freed < count(j, "I") - count(j, "W"):
                    freed += 1
                longest = max(one.waited for one in ranks)
                due[j] = rank.now < needed_at and (
                    rank.now + forward + freed * weight <= needed_at
                    or needed_at - rank.now > longest - rank.waited
                )
        for j in reversed(range(p - 1)):
            due[j] &= due[j + 1]
        for j in range(p):
            if due[j]:
                while ranks[j].held + 1 > limit:
                    put(j, "W")
                fill(j, "F")
                put(j, "F")
        for j in reversed(range(p)):
            fill(j, "I")
            if j == 0 and count(0, "F") == m:
                while count(0, "W") < count(0, "I"):
                    put(0, "W")
            put(j, "I")
    for j in range(p):
        while count(j, "W") < m:
            put(j, "W")
    longest = max(rank.now - rank.ends["F"][0] + forward for rank in ranks)
    return longest, _numbered([[(letter, j) for letter in rank.row] for j, rank in enumerate(ranks)])


def _numbered(rows: list[list[tuple[str, int]]]) -> Order:
    """Count the microbatches of (kind, stage)."""
    order: Order = []
    for row in rows:
        seen: dict[tuple[str, int], int] = defaultdict(int)
        numbered = []
        for kind, stage in row:
            numbered.append((kind, stage, seen[kind, stage]))
            seen[kind, stage] += 1
        order.append(numbered)
    return order


def zero_bubble_v(
    p: int, m: int, costs: tuple[float, float, float, float], limit: float, late: float
) -> Order | None:
    """Return the best of four greedy orders of a V, by a rank's longest wait; None: none fits.

    limit: in stashes of half a rank's layers.
    """
    best: tuple[float, list[_Rank]] | None = None
    for answers in product((True, False), repeat=2):
        granted, before = None, None
        while True:
            try:
                ranks = _greedy_v(p, m, costs, limit, late, answers, granted)
            except DoesNotFit:
                break
            longest = max(rank.waited for rank in ranks)
            if before is not None and longest >= before:
                break
            if best is None or longest < best[0]:
                best = longest, ranks
            before, granted = longest, [rank.waited for rank in ranks]
    if best is None:
        return None
    return _from_letters([rank.row for rank in best[1]])


def _greedy_v(p, m, costs, limit, late, answers, granted) -> list[_Rank]:
    fill_b, fill_f = answers
    cost = dict(zip("FfBbWw", (costs[0] / 2,) * 2 + (costs[1] / 2,) * 2 + (costs[2] / 2,) * 2))
    message = costs[3]
    ranks = [_Rank("FfBbWw") for _ in range(p)]
    granted = granted or [-1.0] * p

    def count(j: int, letter: str) -> int:
        return len(ranks[j].ends[letter])

    def arrival(j: int, letter: str) -> float | None:
        """Return when the next of a letter can be; None: what it needs isn't planned."""
        need = _need(letter, j, count(j, letter), p)
        if letter in "fBb" and count(j, "FfBb"["FfBb".index(letter) - 1]) <= count(j, letter):
            return None
        if need is None:
            return 0.0
        ends = ranks[need[1]].ends[need[0]]
        if len(ends) <= need[2]:
            return None
        return ends[need[2]] + message if need[1] != j else 0.0

    def put(j: int, letter: str) -> None:
        there = arrival(j, letter)
        if there is None or (letter in "Ff" and ranks[j].held + 1 > limit) or count(j, letter) >= m:
            raise DoesNotFit
        ranks[j].run(letter, cost[letter], there, 1 if letter in "Ff" else late - 1)
        if letter in "Bb":
            ranks[j].late.append("W" if letter == "B" else "w")

    def put_weight(j: int) -> None:
        if not ranks[j].late:
            raise DoesNotFit
        letter = ranks[j].late.popleft()
        ranks[j].run(letter, cost[letter], 0, -late)

    def fill_and_put(j: int, letter: str, never_wait: bool) -> None:
        rank, there = ranks[j], arrival(j, letter)
        if there is None:
            raise DoesNotFit
        comes = (letter in "FB" and j > 0) or (letter in "fb" and j < p - 1)
        while rank.late and comes and there >= rank.now + cost["W"]:
            put_weight(j)
        longest = max(max(one.waited for one in ranks), max(granted) - granted[j], 0)
        if rank.late and comes and there - rank.now > longest - rank.waited and never_wait:
            put_weight(j)
        put(j, letter)

    for j in range(p):
        put(j, "F")
    for j in reversed(range(p)):
        if j < p - 1:
            there = ranks[j + 1].ends["f"][0] + message
            while (
                ranks[j].held + 2 * (j + 1) <= limit
                and ranks[j].now + cost["F"] <= there
                and count(j, "F") < m
            ):
                for upper in range(j + 1):
                    put(upper, "F")
        put(j, "f")
    turn = 0
    for j in range(1, p):
        while (
            count(j, "F") + count(j, "f") < count(j - 1, "F") + count(j - 1, "f")
            or count(j, "f") <= count(j - 1, "f") < m
        ):
            for lower in reversed(range(j, p)):
                if count(lower, "Ff"[turn]) < m:
                    put(lower, "Ff"[turn])
            turn = 1 - turn
    for _ in range(2 * m):
        up = [
            count(j, "b") < count(j, "B")
            and (j == p - 1 or count(j + 1, "b") > count(j, "b") or count(j, "B") >= m)
            for j in range(p)
        ]
        for j in reversed(range(p)):
            if up[j]:
                fill_and_put(j, "b", True)
        for j in range(p):
            if not up[j]:
                fill_and_put(j, "B", fill_b)
        for j in range(p):
            letter = ""
            if count(j, "f") < m:
                if count(j, "f") >= count(j, "F"):
                    letter = "F"
                elif j == p - 1 or count(j + 1, "f") > count(j, "f"):
                    letter = "f"
                elif count(j, "F") < m and (j == 0 or count(j - 1, "F") > count(j, "F")):
                    letter = "F"
            if letter:
                while ranks[j].held + 1 > limit:
                    put_weight(j)
                fill_and_put(j, letter, fill_f)
    for j in range(p):
        while ranks[j].late:
            put_weight(j)
    return ranks

"""Read a user's own table from a file, in whichever form people have it.

    rank 0: F0@0 F1@0 B0@0 B1@0     our text, as write_table() writes it (see table)
      F2@0 B2@0                     an indented line continues the rank above
    F0 F1 B0 B1                     one stage a rank: `rank 0:` and stages may be left out
    0F0,0F1,,0B0,0B1                CSV: our tokens, or PyTorch's, as its schedules' _dump_csv
                                    writes them (see csv_table)
    F0.0 F0.1 BW0.1                 chunks of a rank instead of stages, as papers, sail-sg, DualPipe and
                                    Megatron write them (see chunk_orders)

A file may hold more than a table. What lowering adds is left out: messages, gathers and releases,
reductions, the update; parts of a computation are joined. PyTorch's older letters are read as what
they mean, and microbatches are numbered in the order of their backwards where all stages agree on
another one than 0, 1, 2 ... Table.notes says what was done.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import ADD_TO_GRADIENTS, COMPUTE, OFFLOAD, PAIR, Action
from mpitrain.schedules.formats.chunk_orders import PLACEMENTS, lines, names_chunks, placed_rows, read_order
from mpitrain.schedules.formats.csv_table import read_csv_rows
from mpitrain.schedules.formats.table_tokens import FULL_BACKWARD, read_token
from mpitrain.schedules.limits import require_readable
from mpitrain.schedules.pairs import grouped
from mpitrain.schedules.play.simulate import simulate_table
from mpitrain.schedules.proof.check import check_table
from mpitrain.schedules.table import HEADS, Rows, Table, make_table, read_lines

FORM = "lines such as 'rank 0: F0@0 F1@0 B0@0 B1@0', F1@0 being the forward of microbatch 1 on stage 0"
HOW = "write the table with `mpitrain schedule NAME --stages P --microbatches M --table mine.txt`"
_OTHER_FORMS = (  # what people have that is no table: how it begins, what it is, what to do instead
    (re.compile(r"tick\s+[0-9]"), "a drawing, in which stages are not named", HOW),
    (re.compile(r"\{|\[+[\s\"{]"), "JSON", HOW),
    (
        re.compile(r"Step\s+[0-9]"),
        "the grid that PyTorch prints, a row for each step",
        "write a row for each rank with its _dump_csv",
    ),
)
_MOST_NUMBERS = 8  # in a note


@lru_cache(maxsize=1)  # a configuration is resolved with a table, and then planned with it
def read_any(text: str, name: str = "user") -> Table:
    """Read a table in any of the forms, and check it by itself. Raises ScheduleError for a flaw in it."""
    require_readable(name, text)
    _refuse_other_forms(text, name)
    if names_chunks(text):
        return _read_chunks(text, name)
    separator = _separator(text)
    ranks, heads = read_csv_rows(text, name, separator) if separator else read_lines(text, name, read_token)
    notes: list[str] = []
    ranks = _without_additions(ranks, notes)
    ranks = _with_stages(ranks, name, notes)
    return _checked(ranks, heads, name, notes)


def _read_chunks(text: str, name: str) -> Table:
    """Read an order that names chunks, under the placement whose step is shortest."""
    order = read_order(text, name)
    notes = [f"left out what is added to every table: {order.messages} messages"] * (order.messages > 0)
    read: dict[str, Table] = {}
    makespans: dict[str, float] = {}
    flaws: list[ScheduleError] = []
    for placed, rows, heads in placed_rows(order, name):
        try:
            read[placed] = _checked(rows, heads, name, list(notes))
            makespans[placed] = simulate_table(read[placed]).makespan
        except ScheduleError as flaw:
            flaws.append(flaw)
    if not read:
        raise flaws[0]
    if not makespans:  # whoever proves it names the deadlock
        return next(iter(read.values()))
    _, placed = min((makespan, placed) for placed, makespan in makespans.items())
    table = read[placed]
    if not placed or len(table.rank_of) == len(table.ranks):
        return table
    notes = [f"chunks are read as {PLACEMENTS[placed]}"]
    if {"looped", "v"} <= makespans.keys():
        notes[0] += f"; a line 'placed {min(makespans.keys() - {placed})}' reads them otherwise"
    return table._replace(notes=(*table.notes, *notes))


def _checked(ranks: Rows, heads: dict[str, int], name: str, notes: list[str]) -> Table:
    ranks = _in_our_letters(ranks, name, notes)
    table = _ascending(make_table(name, ranks, **heads), notes)._replace(notes=tuple(notes))
    check_table(table)
    return table


# ---------------------------------------------------------------- which form


def _separator(text: str) -> str:
    """Return what separates cells: a comma, or as spreadsheets do a tab or a semicolon; of text ""."""
    written = [line for _, line in lines(text)]
    if any(re.match(rf"rank\s|({'|'.join(HEADS)})\s+[0-9]", line) for line in written):
        return ""
    marks = ",;" if any(" " in line for line in written) else ",\t;"
    return next((mark for mark in marks if any(mark in line for line in written)), "")


def _refuse_other_forms(text: str, name: str) -> None:
    for number, line in lines(text):
        for begins, found, instead in _OTHER_FORMS:
            if begins.match(line):
                raise ScheduleError(f"{name}, line {number}: found {found}; {instead}, or {FORM}")


# ---------------------------------------------------------- what is left out, and what letters mean


def _without_additions(ranks: Rows, notes: list[str]) -> Rows:
    """Leave out what lowering adds; join computations in parts, where their first part stands."""
    left_out = Counter(action.kind for actions in ranks for action in actions if _is_added(action))
    if left_out:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(left_out.items()))
        notes.append(f"left out what is added to every table: {kinds}")
    if any(action.part is not None and not _is_added(action) for actions in ranks for action in actions):
        notes.append("parts of computations are joined: F3@1/0 F3@1/1 is F3@1")
    return [list(_computations(actions)) for actions in ranks]


def _is_added(action: Action) -> bool:
    return action.kind not in (*COMPUTE, OFFLOAD, FULL_BACKWARD, "PAIR")


def _computations(actions: Iterable[Action]) -> Iterator[Action]:
    kept = [action for action in actions if not _is_added(action)]
    for group in grouped(kept):
        first = [action._replace(part=None) for action in group if not action.part]
        yield from (
            first
            if first != [PAIR] and len(first) == len(group)
            else [action for action in first if action != PAIR]
        )


def _with_stages(ranks: Rows, name: str, notes: list[str]) -> Rows:
    """Give each rank the stage of its number. Raises ScheduleError if the file names some."""
    found = {
        action.stage is None: (rank, action)
        for rank, actions in enumerate(ranks)
        for action in actions
        if action != PAIR
    }
    if True not in found:
        return ranks
    if False in found:
        rank, action = found[True]
        raise ScheduleError(
            f"{name}: rank {rank}: '{action.kind}{action.index}' names no stage, '{found[False][1]}' does; "
            f"write {action.kind}{action.index}@STAGE everywhere"
        )
    notes.append("no stages are named: rank r has stage r")
    return [
        [action if action == PAIR else action._replace(stage=rank) for action in actions]
        for rank, actions in enumerate(ranks)
    ]


def _in_our_letters(ranks: Rows, name: str, notes: list[str]) -> Rows:
    """Return a table whose whole backward is B and whose backward for inputs is I.

    PyTorch's older form, and the zero-bubble papers, write B for our I, and BW for our B. Without
    any I a B is that if the file has BW, or if the same microbatch has a W.
    """
    kinds = {action.kind for actions in ranks for action in actions}
    if FULL_BACKWARD in kinds and "I" in kinds:
        raise ScheduleError(
            f"{name}: found I and BW: with I for inputs, a whole backward is B; write B for BW"
        )
    for_inputs = set() if "I" in kinds else _for_inputs(ranks, FULL_BACKWARD in kinds)
    if for_inputs:
        notes.append(
            "B is read as I, the backward for inputs, as W stands beside it"
            + ", and BW as B" * (FULL_BACKWARD in kinds)
        )

    def in_our_letters(action: Action) -> Action:
        if action in for_inputs:
            return action._replace(kind="I")
        return action._replace(kind="B") if action.kind == FULL_BACKWARD else action

    return [list(map(in_our_letters, actions)) for actions in ranks]


def _for_inputs(ranks: Rows, every: bool) -> set[Action]:
    """Return the B that are backwards for inputs: every one, or those whose microbatch has a W."""
    actions = list(chain.from_iterable(ranks))
    has_weights = {action[1:] for action in actions if action.kind == "W"}
    return {action for action in actions if action.kind == "B" and (every or action[1:] in has_weights)}


# --------------------------------------------------------- in which order microbatches are numbered


def _ascending(table: Table, notes: list[str]) -> Table:
    """Number microbatches in the order of their backwards, that of sums, where all stages agree.

    Looped BFS and GPipe as published run backwards from the last microbatch to the first. Which
    microbatch has which number changes nothing else: neither times nor memory nor messages.
    """
    orders = {copy: _orders(table, copy) for copy in range(table.copies)}
    number = table.num_microbatches // table.segments
    if any(len(found) != 1 or len(next(iter(found))) != number for found in orders.values()):
        return table  # as it is: check_table finds what is wrong, if anything is
    order = {copy: found.pop() for copy, found in orders.items()}
    if all(found == tuple(range(number)) for found in order.values()):
        return table
    new = {(copy, old): at for copy, found in order.items() for at, old in enumerate(found)}

    def renumbered(action: Action) -> Action:
        if action == PAIR:
            return action
        microbatch, segment = divmod(action.index, table.segments)
        return action._replace(index=new[action.stage // table.depth, microbatch] * table.segments + segment)

    first = order[0]
    shown = " ".join(map(str, first[:_MOST_NUMBERS])) + " ..." * (number > _MOST_NUMBERS)
    notes.append(
        "microbatches are numbered in the order of their backwards, in which gradients are summed: 0 1 2 "
        f"... were {shown}"
    )
    return table._replace(ranks=tuple(tuple(map(renumbered, actions)) for actions in table.ranks))


def _orders(table: Table, copy: int) -> set[tuple[int, ...]]:
    """Return the orders in which a copy's stages add microbatches, to matrices and to vectors."""
    stages = range(copy * table.depth, (copy + 1) * table.depth)
    of_matrices = _order_of(table, ADD_TO_GRADIENTS)
    of_vectors = _order_of(table, ("B", "I"))
    return {tuple(order[stage]) for order in (of_matrices, of_vectors) for stage in stages}


def _order_of(table: Table, kinds: Sequence[str]) -> list[dict[int, None]]:
    """Return for each stage the microbatches of these kinds, each where it stands first."""
    orders: list[dict[int, None]] = [{} for _ in range(table.num_stages)]
    for actions in table.ranks:
        for action in actions:
            if action.kind in kinds:
                orders[action.stage].setdefault(action.index // table.segments)
    return orders

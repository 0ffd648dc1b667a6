"""A table in the field's notation, which `mpitrain schedule --json` prints and other programs read.

F3            forward
B3            backward for inputs, our I
W3            backward for weights
R3            forward again: recomputation
O3            the forward that follows offloads what it keeps
BW3           whole backward, our B
F3.1          on the rank's chunk 1, where ranks have several stages (of a model with two copies: on
              copy 1)
F3.1/s2       segment 2 of the sequence, where microbatches are cut
[F3.0|BW1.1]  a pair that runs together
"""

from mpitrain.schedules.actions import PAIR, Action
from mpitrain.schedules.pairs import grouped
from mpitrain.schedules.table import Table

LETTERS = {"F": "F", "B": "BW", "I": "B", "W": "W", "R": "R", "O": "O"}


def operations(table: Table, chunked: bool | None = None) -> list[list[str]]:
    """Return every rank's operations, a pair as one. chunked: name chunks; default: if several."""
    if chunked is None:
        chunked = max(map(len, table.chunks)) > 1
    chunk = {
        stage: f".{position}" if chunked else ""
        for stages in table.chunks
        for position, stage in enumerate(stages)
    }

    def write(action: Action) -> str:
        microbatch, segment = divmod(action.index, table.segments)
        return f"{LETTERS[action.kind]}{microbatch}{chunk[action.stage]}" + (
            f"/s{segment}" if table.segments > 1 else ""
        )

    def together(group: tuple[Action, ...]) -> str:
        words = "|".join(map(write, group[PAIR in group :]))
        return f"[{words}]" if PAIR in group else words

    return [list(map(together, grouped(actions))) for actions in table.ranks]

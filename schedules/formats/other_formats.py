"""Write a table as other projects read theirs.

    papers          F3.1 BW3.1 [F3.0|BW1.1], a line for each rank (see notation)
    torch           PyTorch's CSV of computations: _load_csv(file, "compute_only")
    torch-messages  its CSV with sends and receives: _load_csv(file, "compute_comms")
    megatron        Megatron's order of chunks from 1, negative backwards: convert_schedule_table_to_order
    sail            the ScheduledNodes of sail-sg's zero-bubble-pipeline-parallelism, a Python list a rank
    dualpipe        the steps of DualPipe: counted, W is the oldest that waits, of either chunk

Each is read back as the same table (see chunk_orders, csv_table): what isn't is refused.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import OFFLOAD, PAIR, Action
from mpitrain.schedules.formats.notation import LETTERS, operations
from mpitrain.schedules.formats.user_table import read_any
from mpitrain.schedules.lowering.messages import with_messages
from mpitrain.schedules.pairs import grouped
from mpitrain.schedules.table import Table, comment_of, heads_of


def write_as(form: str, table: Table) -> str:
    """Return a table's text in a form of FORMS; ScheduleError for what that has no words for."""
    frees = any(action.kind in ("R", OFFLOAD) for row in table.ranks for action in row)
    if frees and form != "papers":
        raise ScheduleError(
            f"{table.name}: {form}'s form has no recomputation and no offloading; leave --format out"
        )
    text = FORMS[form](table)
    for placed in ("", "placed looped\n", "placed v\n"):
        if _is_read_as(table, placed + text):
            return placed + text
    raise ScheduleError(
        f"{table.name}: {form}'s form would be read as another order, as it counts microbatches, or knows "
        "stages by their chunks alone; choose another --format"
    )


def _is_read_as(table: Table, text: str) -> bool:
    try:
        return read_any(text, table.name)._replace(notes=()) == table._replace(notes=())
    except ScheduleError:
        return False


def _papers(table: Table) -> str:
    return _text(table, map(" ".join, operations(table, chunked=True)))


def _torch(table: Table) -> str:
    return _torch_csv(table, table.ranks)


def _torch_messages(table: Table) -> str:
    return _torch_csv(table, with_messages(table))


def _torch_csv(table: Table, ranks: Iterable[Iterable[Action]]) -> str:
    _require(table, "torch", copies=False, segments=False)
    rows = [",".join(map(_torch_cell, grouped(row))) for row in ranks]
    return "\n".join([*rows, ""])


def _torch_cell(group: Sequence[Action]) -> str:
    words = [f"{action.stage}{action.kind}{action.index}" for action in group if action != PAIR]
    return f"({';'.join(words)})OVERLAP_F_B" if PAIR in group else words[0]


def _megatron(table: Table) -> str:
    _require(table, "megatron", copies=False, segments=False, pairs=False, split=False)
    sign = {"F": 1, "B": -1}
    rows = (
        " ".join(str(sign[action.kind] * (chunk_of[action.stage] + 1)) for action in row)
        for row, chunk_of in zip(table.ranks, _chunks(table))
    )
    return _text(table, rows)


def _sail(table: Table) -> str:
    _require(table, "sail", copies=False, pairs=False)
    return _text(
        table, map(_sail_row, range(len(table.ranks)), table.ranks, _chunks(table), repeat(table.segments))
    )


def _sail_row(rank: int, row: Iterable[Action], chunk_of: Mapping[int, int], segments: int) -> str:
    nodes = (
        f"ScheduledNode(type={LETTERS[kind]}, stage={rank}, microbatch={index // segments}, "
        f"chunk={chunk_of[stage]}, seq_split_idx={index % segments}, layer_group_idx={stage})"
        for kind, index, stage, _ in row
    )
    return f"[{', '.join(nodes)}]"


def _dualpipe(table: Table) -> str:
    _require(table, "dualpipe", segments=False)
    rows = (
        " ".join(_dualpipe_steps(row, chunk_of, f"{table.name}: rank {rank}"))
        for rank, (row, chunk_of) in enumerate(zip(table.ranks, _chunks(table)))
    )
    return _text(table, rows)


def _dualpipe_steps(row: Iterable[Action], chunk_of: Mapping[int, int], where: str) -> Iterator[str]:
    waiting: deque[tuple[int, int]] = deque()
    for group in grouped(row):
        words = []
        for kind, index, stage, _ in group[PAIR in group :]:
            if kind == "I":
                waiting.append((index, stage))
            if kind == "W" and waiting.popleft() != (index, stage):
                raise ScheduleError(
                    f"{where}: W{index}@{stage} isn't the oldest that waits, as DualPipe's are"
                )
            words.append("W" if kind == "W" else f"{LETTERS[kind]}.{chunk_of[stage]}")
        yield f"[{'|'.join(words)}]" if PAIR in group else words[0]


def _chunks(table: Table) -> list[dict[int, int]]:
    return [{stage: chunk for chunk, stage in enumerate(stages)} for stages in table.chunks]


def _require(
    table: Table,
    form: str,
    *,
    copies: bool = True,
    segments: bool = True,
    pairs: bool = True,
    split: bool = True,
) -> None:
    kinds = {action.kind for row in table.ranks for action in row}
    for possible, there, what in (
        (copies, table.copies > 1, "two copies of the model"),
        (segments, table.segments > 1, "segments of a sequence"),
        (pairs, "PAIR" in kinds, "pairs of a forward and a backward"),
        (split, bool({"I", "W"} & kinds), "backwards for inputs and for weights apart"),
    ):
        if there and not possible:
            raise ScheduleError(f"{table.name}: {form}'s form has no {what}; choose another --format")


def _text(table: Table, rows: Iterable[str]) -> str:
    heads = [f"{what} {number}" for what, number in heads_of(table)]
    return "\n".join([comment_of(table), *heads, *rows, ""])


FORMS: dict[str, Callable[[Table], str]] = {
    "papers": _papers,
    "torch": _torch,
    "torch-messages": _torch_messages,
    "megatron": _megatron,
    "sail": _sail,
    "dualpipe": _dualpipe,
}

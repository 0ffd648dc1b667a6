"""Read an order that names a rank's chunks instead of stages, as other projects write theirs.

    F3.1 B3.1 W3.1 BW3.1 [F3.0|BW1.1] F3.1/s2   papers, and `mpitrain schedule --json` (see notation)
    F.0 F.1 B.1 W [F.0|BW.1]                    the steps of DualPipe: microbatches are counted, and W is
                                                the oldest that waits, of either chunk
    1 1 2 2 -2 -2 -1 -1                         Megatron's order of chunks, from 1; backwards are negative
    f3 F3 b3 B3 w3 sf3                          what sail-sg's print_schedule prints: chunk 0 in lower
                                                case, chunk 1 in upper
    ScheduledNode(type=F, stage=0, ...)         its nodes, as Python prints them

Which stages the chunks are follows from the order: of the placements under which it can be played
the one with the shortest step. A line `placed looped`, `placed v` or `copies 2` decides it; nodes
that have their layer_group_idx name their stage.
Sources: Megatron-LM's convert_schedule_table_to_order, zero-bubble-pipeline-parallelism's
scheduler/graph.py and passes.py, DualPipe's step().
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import OFFLOAD, PAIR, Action
from mpitrain.schedules.table import HEAD, Rows, add_head

_NUMBER = "[0-9]{1,9}"
_PAPERS = re.compile(rf"(F|BW|B|I|W|R|O)({_NUMBER})?\.({_NUMBER})(?:/s({_NUMBER}))?")
_OLDEST = re.compile("[Ww]")
_MEGATRON = re.compile("-?[1-9][0-9]{0,3}")
_SAIL = re.compile(rf"(s|r)?(f|bw|b|w)({_NUMBER})|(S|R)?(F|BW|B|W)({_NUMBER})")
_PAIR = re.compile(r"\[([^|\]]+)\|([^|\]]+)\]")
_NODE = re.compile(r"ScheduledNode\(([^()]*)\)")
_FIELD = re.compile(r"(\w+)=(?:<FuncType\.\w+: )?'?(-?\w+)")
_ROW = re.compile(r"(?:rank\s+([0-9]{1,9})\s*:?\s*)?(?:ORDER\s*)?(.*)", re.IGNORECASE)
_PLACED = re.compile(r"placed\s+(\w+)")
_MARKS = (_PAPERS, _PAIR, re.compile(f"[sr]?(?:f|bw|b|w){_NUMBER}"))  # not F3, which is a table's, too
STAGE = "layer_group_idx"  # of a node
PLACEMENTS = {
    "looped": "loops: rank r has stages r, r+p, ...",
    "v": "a V: rank r has stages r and 2p-1-r",
    "copies": "two copies: rank r has stage r of the first and p-1-r of the second",
    "phases": "two copies, of which the upper half of the ranks calls the second 0",
}


class ChunkAction(NamedTuple):
    """A computation, by its rank's chunk; microbatch None: to be counted. PAIR joins the next two."""

    kind: str
    chunk: int | None = None
    microbatch: int | None = None
    segment: int = 0
    stage: int | None = None  # if the file names it


class ChunkOrder(NamedTuple):
    """The rows of a file, its heads, the placement it names, and how many messages were left out."""

    ranks: list[list[ChunkAction]]
    heads: dict[str, int]
    placed: str | None
    messages: int


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that say something, with their numbers from 1."""
    for number, line in enumerate(text.splitlines(), start=1):
        if line := line.partition("#")[0].strip():
            yield number, line


def names_chunks(text: str) -> bool:
    """Whether a file is such an order."""
    return any(_names_chunks(line) for _, line in lines(text))


def _names_chunks(line: str) -> bool:
    words = _words(line)
    return (
        any(mark.fullmatch(word) for word in words for mark in _MARKS)
        or (bool(words) and all(map(_MEGATRON.fullmatch, words)))
        or bool(_NODE.search(line))
    )


def read_order(text: str, name: str) -> ChunkOrder:
    """Read the rows of all ranks. Raises ScheduleError naming the line."""
    ranks: list[list[ChunkAction]] = []
    heads: dict[str, int] = {}
    placed, messages = None, 0
    for number, line in lines(text):
        try:
            if head := HEAD.fullmatch(line):
                add_head(heads, head[1], int(head[2]))
            elif named := _PLACED.fullmatch(line):
                placed = _read_placement(named[1])
            elif nodes := _NODE.findall(line):
                messages += _add_nodes(nodes, ranks)
            else:
                row = _read_row(line, len(ranks))
                ranks.append([action for action in row if action.kind != "MESSAGE"])
                messages += len(row) - len(ranks[-1])
        except ScheduleError as error:
            raise ScheduleError(f"{name}, line {number}: {error.args[0]}") from None
    return ChunkOrder(ranks, heads, placed, messages)


def _read_placement(name: str) -> str:
    if name not in ("looped", "v"):
        raise ScheduleError(
            f"found 'placed {name[:30]}', needed 'placed looped' or 'placed v'; of two copies 'copies 2'"
        )
    return name


def _words(line: str) -> list[str]:
    match = _ROW.fullmatch(line)
    assert match is not None
    row = match[2]
    if row.startswith("[") and row.endswith("]") and "|" not in row:
        row = row[1:-1]  # a Python list
    return [word for word in re.split(r"[\s,]+", row) if word not in ("", ".")]


def _read_row(line: str, rank: int) -> list[ChunkAction]:
    match = _ROW.fullmatch(line)
    assert match is not None
    if match[1] is not None and int(match[1]) != rank:
        raise ScheduleError(f"found 'rank {match[1]}', needed 'rank {rank}: ' and its order")
    return [action for word in _words(line) for action in _read_word(word)]


def _read_word(word: str) -> list[ChunkAction]:
    if pair := _PAIR.fullmatch(word):
        return [ChunkAction("PAIR"), *_read_word(pair[1]), *_read_word(pair[2])]
    if token := _PAPERS.fullmatch(word):
        kind, microbatch, chunk, segment = token.groups()
        return [
            ChunkAction(kind, int(chunk), None if microbatch is None else int(microbatch), int(segment or 0))
        ]
    if _MEGATRON.fullmatch(word):
        chunk = int(word)
        return [ChunkAction("F" if chunk > 0 else "BW", abs(chunk) - 1)]
    if token := _SAIL.fullmatch(word):
        message, kind, microbatch = token.groups()[3:] if token[6] else token.groups()[:3]
        return [ChunkAction("MESSAGE" if message else kind.upper(), int(bool(token[6])), int(microbatch))]
    if _OLDEST.fullmatch(word):
        return [ChunkAction("W")]
    raise ScheduleError(
        f"{word[:100]!r} is no step of an order of chunks; write for example F3.1, BW3.1, [F3.0|BW1.1], "
        "f3 and F3 of chunks 0 and 1, or 1 and -1"
    )


def _add_nodes(nodes: Iterable[str], ranks: list[list[ChunkAction]]) -> int:
    """Add ScheduledNodes to the ranks they name, and return how many are messages."""
    messages = 0
    for node in nodes:
        fields = dict(_FIELD.findall(node))
        kind = fields.get("type", "")
        if "_" in kind:
            messages += 1
            continue
        try:
            rank, microbatch, chunk, segment = (
                int(fields.get(key, default))
                for key, default in (("stage", ""), ("microbatch", ""), ("chunk", 0), ("seq_split_idx", 0))
            )
            stage = None if fields.get(STAGE) in (None, "None") else int(fields[STAGE])
        except ValueError:
            raise ScheduleError(
                f"found ScheduledNode({node[:80]}), needed type, stage and microbatch"
            ) from None
        is_below_0 = min(rank, microbatch, chunk, segment, stage or 0) < 0
        if kind not in ("F", "B", "W", "BW", "R") or rank > len(ranks) or is_below_0:
            raise ScheduleError(
                f"found ScheduledNode({node[:80]}), needed F, B, W, BW or R, nothing below 0, and stages in "
                "order from 0"
            )
        if rank == len(ranks):
            ranks.append([])
        ranks[rank].append(ChunkAction(kind, chunk, microbatch, segment, stage))
    return messages


# ---------------------------------------------------------------- microbatches and stages


def placed_rows(order: ChunkOrder, name: str) -> Iterator[tuple[str, Rows, dict[str, int]]]:
    """Yield the order's rows and heads under each placement it may have; "": it names its stages.

    Raises ScheduleError if a W waits for nothing.
    """
    ranks = [list(_numbered(row, f"{name}: rank {rank}")) for rank, row in enumerate(order.ranks)]
    segments = 1 + max((action.segment for row in ranks for action in row), default=0)
    heads = {"segments": segments, **order.heads}
    for placed in _possible(order):
        stage = _stages(placed, len(ranks))
        rows = [
            [_on_stage(action, stage(rank, action), heads["segments"]) for action in row]
            for rank, row in enumerate(ranks)
        ]
        yield placed, rows, heads


def _possible(order: ChunkOrder) -> tuple[str, ...]:
    actions = list(chain.from_iterable(order.ranks))
    if order.heads.get("copies", 1) > 1:
        return ("copies", "phases")
    if order.placed:
        return (order.placed,)
    if all(action.stage is not None for action in actions):
        return ("",)
    return ("looped", "v") if max(action.chunk or 0 for action in actions) == 1 else ("looped",)


def _stages(placed: str, num_ranks: int) -> Callable[[int, ChunkAction], int]:
    def stage(rank: int, action: ChunkAction) -> int:
        if not placed:
            assert action.stage is not None
            return action.stage
        chunk = action.chunk or 0
        if placed == "phases" and rank >= num_ranks // 2:
            chunk = 1 - chunk
        mirrored = placed != "looped" and chunk % 2
        return chunk * num_ranks + (num_ranks - 1 - rank if mirrored else rank)

    return stage


def _on_stage(action: ChunkAction, stage: int, segments: int) -> Action:
    if action.kind == "PAIR":
        return PAIR
    assert action.microbatch is not None
    return Action(action.kind, action.microbatch * segments + action.segment, stage)


def _numbered(row: Iterable[ChunkAction], where: str) -> Iterator[ChunkAction]:
    """Count the microbatches of each chunk where they aren't named; a W without one is the oldest."""
    counts: dict[tuple[str, int | None], int] = defaultdict(int)
    waiting: deque[ChunkAction] = deque()
    for action in row:
        if action.kind == "W" and action.microbatch is None:
            action = _oldest(waiting, action.chunk, where)
        elif action.kind != "PAIR":
            way = ("F" if action.kind in ("F", OFFLOAD) else "B", action.chunk)
            if action.microbatch is None:
                action = action._replace(microbatch=counts[way])
            counts[way] += action.kind not in ("W", "R", OFFLOAD)
            if action.kind in ("B", "I"):
                waiting.append(action._replace(kind="W"))
        yield action


def _oldest(waiting: deque[ChunkAction], chunk: int | None, where: str) -> ChunkAction:
    for action in waiting:
        if chunk in (None, action.chunk):
            waiting.remove(action)
            return action
    raise ScheduleError(f"{where}: a W stands before the backward for inputs that it belongs to")

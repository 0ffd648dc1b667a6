"""Schedules of several chunks a rank in loops: stage c * p + r is chunk c of rank r.

A *group* of microbatches goes through a chunk before the next chunk's turn. Small groups go depth
first (interleaved 1F1B), and one group of all microbatches goes breadth first (Looped BFS).
Forwards of 5 microbatches in groups of 3 and 2 through two chunks:

    chunk        0 0 0 1 1 1 0 0 1 1
    microbatch   0 1 2 0 1 2 3 4 3 4
"""

from mpitrain.errors import ScheduleError, counted
from mpitrain.schedules.actions import Action, B, F, I, W
from mpitrain.schedules.families.one_f_one_b import alternate
from mpitrain.schedules.families.zero_bubble import with_weights
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.options import Options

CHUNKS = 2  # stages per rank, if the user doesn't say
PERIOD = 3  # slots of F, I and W


def interleaved(num_ranks: int, num_microbatches: int, options: Options) -> list[list[Action]]:
    """Compute order of every rank under interleaved 1F1B (arXiv:2104.04473 section 2.2.2).

    For 2 ranks, 4 microbatches:

    rank 0:  F0@0 F1@0 F0@2 F1@2 F2@0 B0@2 F3@0 B1@2 F2@2 B0@0 F3@2 B1@0 B2@2 B3@2 B2@0 B3@0
    rank 1:  F0@1 F1@1 F0@3 B0@3 F1@3 B1@3 F2@1 B0@1 F3@1 B1@1 F2@3 B2@3 F3@3 B3@3 B2@1 B3@1

    The bubble is 1F1B's divided by the chunks; messages are multiplied by them. Rank 0 holds the
    most stashes, 2 (p-1) + (v-1) p + 1 of a v-th of its layers for v chunks.

    A group has p microbatches, or as few more as make all groups equal but for one microbatch: as
    in Megatron-LM where p divides the microbatches, and in PyTorch and Llama 3 (arXiv:2407.21783
    section 3.3.2) otherwise. `options.group` sets another size. Below p it is grouped interleaved 1F1B
    (arXiv:2405.15362): fewer stashes, a split backward, and ranks wait.
    """
    chunks = options.chunks or CHUNKS
    if options.group is not None and smallest_group(num_ranks) <= options.group < num_ranks:
        return split_groups(num_ranks, num_microbatches, chunks, options.group)
    sizes = groups("interleaved", num_ranks, num_microbatches, options.group)
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = _in_loops(num_ranks, rank, sizes, chunks)
        warmup = 2 * (num_ranks - 1 - rank) + (chunks - 1) * max(sizes)
        rows.append(alternate(forwards, [B(m, stage) for m, stage in backwards], warmup))
    return rows


def smallest_group(num_ranks: int) -> int:
    """Return the fewest microbatches of a group under `interleaved`: half as many as ranks.

    With fewer a backward would come around later than the rank's next turn.
    """
    return (num_ranks + 1) // 2


def split_groups(num_ranks: int, num_microbatches: int, chunks: int, group: int) -> list[list[Action]]:
    """Place F, I and W in slots: a turn of them is three, and a group has `group` turns a chunk.

    group: from smallest_group() to the number of ranks.
    """
    turns = PERIOD * group
    rows = []
    for rank in range(num_ranks):
        first_backward = turns * (chunks - 1) + PERIOD * (num_ranks - 1) + 1 - 2 * rank
        slots = []
        for m in range(num_microbatches):
            number, place = divmod(m, group)
            start = PERIOD * place + turns * chunks * number
            for chunk in range(chunks):
                turn = start + turns * chunk
                slots.append((turn + rank, F(m, chunk * num_ranks + rank)))
                late = (chunks - 1 - chunk) * num_ranks + rank
                slots.append((turn + first_backward, I(m, late)))
                slots.append((turn + first_backward + 1, W(m, late)))
        rows.append([action for _, action in sorted(slots, key=lambda placed: placed[0])])
    return rows


INTERLEAVED = ScheduleFamily(
    interleaved, name="interleaved", takes=("chunks", "group"), placed="looped", held="bounded",
    proposed="always",
)  # fmt: skip


def interleaved_zb(num_ranks: int, num_microbatches: int, options: Options) -> list[list[Action]]:
    """Compute order of every rank under interleaved ZB-1p: ZB-H1 with chunks. For 2 ranks, 4 microbatches:

    rank 0:  F0@0 F1@0 F0@2 F1@2 I0@2 W0@2 F2@0 I1@2 W1@2 F3@0 I0@0 W0@0 F2@2 I1@0 W1@0 F3@2 I2@2
             W2@2 I3@2 W3@2 I2@0 W2@0 I3@0 W3@0
    rank 1:  F0@1 F1@1 F0@3 I0@3 F1@3 I1@3 W0@3 F2@1 I0@1 W1@3 F3@1 I1@1 W0@1 F2@3 I2@3 W1@1 F3@3
             I3@3 W2@3 I2@1 W3@3 I3@1 W2@1 W3@1

    The source is PyTorch's ScheduleInterleavedZeroBubble. With W <= F <= I the bubble is (p-1) (F +
    I - W) / v: smaller than ZB-H1's and interleaved 1F1B's, and with two chunks no rank holds more
    than 1F1B's first one.
    """
    chunks = options.chunks or CHUNKS
    sizes = groups("interleaved-zb", num_ranks, num_microbatches, options.group)
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = _in_loops(num_ranks, rank, sizes, chunks)
        warmup = num_ranks - 1 - rank + (chunks - 1) * max(sizes)
        rows.append(
            with_weights(alternate(forwards, [I(m, stage) for m, stage in backwards], warmup), lag=rank)
        )
    return rows


INTERLEAVED_ZB = ScheduleFamily(
    interleaved_zb, name="interleaved-zb", takes=("chunks", "group"), placed="looped", held="bounded"
)


def looped_bfs(num_ranks: int, num_microbatches: int, options: Options) -> list[list[Action]]:
    """Compute order of every rank under Looped BFS (arXiv:2211.05953). For 2 ranks, 3 microbatches:

    rank 0:  F0@0 F1@0 F2@0 F0@2 F1@2 F2@2 B0@2 B1@2 B2@2 B0@0 B1@0 B2@0
    rank 1:  F0@1 F1@1 F2@1 F0@3 F1@3 F2@3 B0@3 B1@3 B2@3 B0@1 B1@1 B2@1

    Every microbatch is in flight, but a stage's parameters are needed only twice, and gathered no
    more often, and its gradients are complete early. The paper runs each chunk's backwards from the
    last microbatch to the first; we run them ascending, as every schedule here does, so that
    gradients are summed in one order.
    """
    chunks = options.chunks or CHUNKS
    rows = []
    for rank in range(num_ranks):
        forwards, backwards = _in_loops(num_ranks, rank, [num_microbatches], chunks)
        rows.append(forwards + [B(m, stage) for m, stage in backwards])
    return rows


LOOPED_BFS = ScheduleFamily(looped_bfs, name="looped-bfs", takes=("chunks",), placed="looped", held="all")


def _in_loops(
    num_ranks: int, rank: int, sizes: list[int], chunks: int
) -> tuple[list[Action], list[tuple[int, int]]]:
    """Return a rank's forwards, and the (microbatch, stage) of its backwards, in order."""
    forwards = []
    backwards = []
    first = 0
    for size in sizes:
        for chunk in range(chunks):
            for m in range(first, first + size):
                forwards.append(F(m, chunk * num_ranks + rank))
                backwards.append((m, (chunks - 1 - chunk) * num_ranks + rank))
        first += size
    return forwards, backwards


def groups(name: str, num_ranks: int, num_microbatches: int, size: int | None) -> list[int]:
    """Return the sizes of the groups; a rest of fewer microbatches than ranks joins the last group.

    Raises ScheduleError for groups smaller than the number of ranks: the first rank would turn to
    the next chunk before its input has come around.
    """
    if size is None:
        number = max(1, num_microbatches // num_ranks)
        return [num_microbatches // number + (i < num_microbatches % number) for i in range(number)]
    if size < min(num_ranks, num_microbatches):
        needed = f"{num_ranks}, one per rank"
        if name == "interleaved":
            needed = f"{smallest_group(num_ranks)}, half as many as ranks"
        raise ScheduleError(
            f"{name}: found groups of {counted(size, 'microbatches')}, needed at least {needed}; raise group"
        )
    number, rest = divmod(num_microbatches, size)
    if rest >= num_ranks or number == 0:
        return [size] * number + [rest]
    return [size] * (number - 1) + [size + rest]

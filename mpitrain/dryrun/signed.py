"""Operations without a meaning: real ones, over real axes, whose messages say what they belong to.

Each rank puts a header of 8 bytes into every part that another one gets, and looks at those that
come:

    gathered, exchanged, passed on, sent  the first 8 bytes of a part
    summed                                each shard begins with a table of one header a rank, of
                                          which a rank writes its own and others write 0: the sum
                                          has them all. In a shard too short for that, one place
                                          for all: their sum

A header holds the number of the operation among those of its axis and step (of a message between
stages its tag), and the length of the whole buffer. A part of less than 8 bytes carries none.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from mpitrain.comm.axis import Axis
from mpitrain.comm.base.grid import split
from mpitrain.comm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_v,
    barrier,
    reduce_scatter,
    shift,
)
from mpitrain.comm.links import Links
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.progress import Pending
from mpitrain.comm.standins.recipe import Start
from mpitrain.errors import MessageError

WIDTH = 8  # bytes of a header
LENGTH_BITS = 40  # of a header; the others are the number
SUM = 1 << 8 * WIDTH


class MessageHeader(NamedTuple):
    """What a message belongs to."""

    number: int
    num_bytes: int

    def packed(self) -> int:
        """Return it as an integer of 64 bits."""
        return (self.number << LENGTH_BITS | self.num_bytes & (1 << LENGTH_BITS) - 1) % SUM

    def __str__(self) -> str:
        return f"operation {self.number} of {self.num_bytes} bytes"


def unpacked(word: int) -> MessageHeader:
    """Return the header that was packed."""
    return MessageHeader(word >> LENGTH_BITS, word & (1 << LENGTH_BITS) - 1)


def _write(part: np.ndarray, header: MessageHeader) -> None:
    if part.nbytes >= WIDTH:
        part.view(np.uint8)[:WIDTH] = np.frombuffer(header.packed().to_bytes(WIDTH, "little"), np.uint8)


def _read(part: np.ndarray) -> int | None:
    return int.from_bytes(part.view(np.uint8)[:WIDTH].tobytes(), "little") if part.nbytes >= WIDTH else None


class Found(NamedTuple):
    """A header that came.

    source: the coordinate of the rank it came from; None: the sum of all ranks' headers.
    """

    source: int | None
    word: int | None


@dataclass(frozen=True, eq=False)
class Signed:
    """A started operation. `buffers` are its own until it is waited for; `x`, of them, chose the transport.

    ranks: those of the axis.  found: yields the headers that came, when it is complete.
    """

    event: Start
    axis: Axis
    ranks: Sequence[int]
    header: MessageHeader
    pending: Pending
    x: np.ndarray
    buffers: Sequence[np.ndarray]
    found: Callable[[], Iterator[Found]]

    def wait(self) -> tuple[int, int]:
        """Wait until it is complete; return the numbers of headers, and of parts too short for one.

        Raises MessageError, with the rank that sent another one.
        """
        self.pending.wait()
        numbers = [0, 0]
        for source, word in self.found():
            numbers[word is None] += 1
            wanted = self.header.packed() * (self.axis.size if source is None else 1) % SUM
            if word not in (wanted, None):
                raise MessageError(self._mismatch(source, word))
        return numbers[0], numbers[1]

    def _mismatch(self, source: int | None, word: int) -> str:
        event = self.event
        hint = "all ranks need the same configuration and code"
        where = f"{event.operation} on axis {event.axis}"
        if source is None:
            return f"{where}: the ranks have started different operations, here {self.header}; {hint}"
        what = event.message or where
        sent = f"rank {self.ranks[source]} of all sent {unpacked(word)}"
        return f"{what}: {sent}, due was {self.header}; {hint}"


class Sender:
    """Starts what a recipe says, on the axes of a mesh. num_started: operations of this step by axis.

    ranks: of each axis. counts: of each all_to_all_v of a step, by axis, what each rank sends to others.
    """

    def __init__(
        self, mesh: Mesh, ranks: Mapping[str, Sequence[int]], links: Links, counts: dict[str, list[list[int]]]
    ):
        self._mesh = mesh
        self._ranks = ranks
        self._links = links
        self._counts = counts
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)
        self._exchanges: dict[str, int] = defaultdict(int)
        self.num_started: dict[str, int] = defaultdict(int)
        self._start = {
            "all_reduce": self._all_reduce, "reduce_scatter": self._reduce_scatter,
            "all_gather": self._all_gather, "all_to_all": self._all_to_all,
            "all_to_all_v": self._all_to_all_v, "shift": self._shift, "barrier": self._barrier,
            "send": self._send, "receive": self._receive,
        }  # fmt: skip

    def begin(self) -> None:
        """Begin a step."""
        self.num_started.clear()
        self._exchanges.clear()

    def start(self, event: Start) -> Signed:
        """Start an operation. Its buffers hold what they happen to hold, and headers."""
        axis = self._mesh[event.axis]
        message = event.message
        number = self.num_started[event.axis] if message is None else self._links.tag(*message[:3])
        self.num_started[event.axis] += 1
        header = MessageHeader(number % (1 << 8 * WIDTH - LENGTH_BITS), event.num_bytes)
        return Signed(
            event, axis, self._ranks[event.axis], header, *self._start[event.operation](event, axis, header)
        )

    def give_back(self, signed: Signed) -> None:
        """Take the buffers of an operation that is complete."""
        for buffer in signed.buffers:
            self._free[buffer.nbytes].append(buffer)

    def _lend(self, num_bytes: int) -> np.ndarray:
        """Return memory, as elements of 8 bytes if that divides it."""
        free = self._free[num_bytes]
        memory = free.pop() if free else np.zeros(num_bytes, np.uint8)
        return memory.view(np.uint8 if num_bytes % WIDTH else np.uint64)

    # ------------------------------------------------------------ sums

    def _all_reduce(self, event: Start, axis: Axis, header: MessageHeader):
        x = self._lend(event.num_bytes)
        shards = _parts(x, split(len(x), axis.size))
        _sign_sums(shards, header, axis)
        pending = all_reduce(x, axis)
        return pending, x, (x,), lambda: (found for shard in shards for found in _summed(shard, axis))

    def _reduce_scatter(self, event: Start, axis: Axis, header: MessageHeader):
        x = self._lend(event.num_bytes)
        shards = _parts(x, split(len(x), axis.size))
        _sign_sums(shards, header, axis)
        out = self._lend(shards[axis.rank].nbytes).view(x.dtype)
        return reduce_scatter(x, axis, out), x, (x, out), lambda: _summed(out, axis)

    # ------------------------------------------------------------ everything else

    def _all_gather(self, event: Start, axis: Axis, header: MessageHeader):
        out = self._lend(event.num_bytes)
        shards = _parts(out, split(len(out), axis.size))
        _write(shards[axis.rank], header)
        return all_gather(shards[axis.rank], axis, out), out, (out,), lambda: _from_each(shards)

    def _all_to_all(self, event: Start, axis: Axis, header: MessageHeader):
        x = self._lend(event.num_bytes).view(np.uint8)
        out = self._lend(event.num_bytes).view(np.uint8)
        bounds = split(len(x), axis.size)
        for part in _parts(x, bounds):
            _write(part, header)
        return all_to_all(x, axis, out), x, (x, out), lambda: _from_each(_parts(out, bounds))

    def _all_to_all_v(self, event: Start, axis: Axis, header: MessageHeader):
        """Rank r divides what it sends evenly over the others."""
        every = self._counts[event.axis][self._exchanges[event.axis]]
        self._exchanges[event.axis] += 1
        there = shares(event.num_bytes, axis.size, axis.rank)
        back = [shares(n, axis.size, r)[axis.rank] for r, n in enumerate(every)]
        x = self._lend(sum(there)).view(np.uint8)
        out = self._lend(sum(back)).view(np.uint8)
        for part in _parts(x, _bounds(there)):
            _write(part, header)
        pending, came = all_to_all_v(x, there, back, axis, out), _parts(out, _bounds(back))
        return pending, x, (x, out), lambda: self._from_others(came, header, every, axis)

    def _from_others(
        self, parts: list[np.ndarray], header: MessageHeader, every: list[int], axis: Axis
    ) -> Iterator[Found]:
        """Yield headers as if all ranks sent as much as this one; lengths were agreed on before."""
        for source, (part, num_bytes) in enumerate(zip(parts, every)):
            if source != axis.rank:
                word = _read(part)
                same = word == header._replace(num_bytes=num_bytes).packed()
                yield Found(source, header.packed() if same else word)

    def _shift(self, event: Start, axis: Axis, header: MessageHeader):
        x = self._lend(event.num_bytes)
        out = self._lend(event.num_bytes)
        _write(x, header)
        source = (axis.rank - 1) % axis.size
        return shift(x, axis, 1, out), x, (x, out), lambda: iter([Found(source, _read(out))])

    def _barrier(self, event: Start, axis: Axis, header: MessageHeader):
        return barrier(axis), np.empty(0), (), lambda: iter(())

    def _send(self, event: Start, axis: Axis, header: MessageHeader):
        x = self._lend(event.num_bytes)
        message = event.message
        _write(x, header)
        pending = self._links.send(message.kind, message.stage, message.microbatch, x, message.peer)
        return pending, x, (x,), lambda: iter(())

    def _receive(self, event: Start, axis: Axis, header: MessageHeader):
        x = self._lend(event.num_bytes)
        message = event.message
        pending = self._links.receive(message.kind, message.stage, message.microbatch, x, message.peer)
        return pending, x, (x,), lambda: iter([Found(message.peer, _read(x))])


def shares(num_bytes: int, size: int, own: int) -> list[int]:
    """Return how coordinate `own` of `size` ranks divides bytes over the others, as evenly as can be."""
    bounds = iter(split(num_bytes, max(1, size - 1)))
    end = next(bounds)
    counts = []
    for rank in range(size):
        begin = end
        end = end if rank == own else next(bounds)
        counts.append(end - begin)
    return counts


def _bounds(counts: Sequence[int]) -> list[int]:
    return list(accumulate(counts, initial=0))


def _parts(x: np.ndarray, bounds: Sequence[int]) -> list[np.ndarray]:
    return [x[begin:end] for begin, end in zip(bounds, bounds[1:])]


def _from_each(parts: Sequence[np.ndarray]) -> Iterator[Found]:
    return (Found(source, _read(part)) for source, part in enumerate(parts))


def _sign_sums(shards: Sequence[np.ndarray], header: MessageHeader, axis: Axis) -> None:
    """Write the own header into each shard that is summed, and 0 where others write theirs."""
    for shard in shards:
        if shard.itemsize == WIDTH and len(shard):
            table = len(shard) >= axis.size
            shard[: axis.size if table else 1] = 0
            shard[axis.rank if table else 0] = header.packed()


def _summed(shard: np.ndarray, axis: Axis) -> Iterator[Found]:
    if shard.itemsize != WIDTH or not len(shard):
        yield Found(None, None)
    elif len(shard) >= axis.size:
        yield from (Found(source, int(word)) for source, word in enumerate(shard[: axis.size]))
    else:
        yield Found(None, int(shard[0]))

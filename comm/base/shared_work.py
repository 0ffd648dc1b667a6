"""A manager and workers: rank 0 reads items, all ranks work on them, each has some ahead.

    rank 0    read, give, give ... | work on one; give and take meanwhile | yield what is next ...
    others    take | work on it; take the next ones meanwhile | give the result | work ...

A message moves only while both its ranks are in MPI: each looks after them between parts of an
item.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

from mpitrain.comm.base.mpi import MPI
from mpitrain.errors import InputError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm as Communicator
else:
    Communicator = object

TAG = 7
AHEAD = 3  # items that a rank has, of which it works on one
BEAT_S = 1.0  # between two signs of life for ranks that wait
# numbers of messages that are no item and no result
ALIVE, ASKED, OVER = -1, -2, -3

Work = Callable[[Any], Iterable[Any]]
Waiting = Callable[[str], AbstractContextManager[None]]


class WorkMessage(NamedTuple):
    """An item and its number, or the parts of its result, or ALIVE, ASKED (to leave), OVER."""

    number: int
    content: Any = None
    error: InputError | None = None


class _Mailbox:
    """Messages to and from other ranks, which move on in each call."""

    def __init__(self, comm: Communicator):
        self._comm = comm
        self._leaving = list[MPI.Request]()  # with their pickles
        self._coming = list[tuple[int, MPI.Request]]()

    def send(self, message: WorkMessage, rank: int) -> None:
        self._leaving.append(self._comm.isend(message, rank, TAG))

    def look(self) -> list[tuple[int, WorkMessage]]:
        """Return what has come, and from which rank each is; in the order in which it was sent."""
        self._leaving = [request for request in self._leaving if not request.test()[0]]
        status = MPI.Status()
        while (coming := self._comm.improbe(tag=TAG, status=status)) is not None:
            self._coming.append((status.source, coming.irecv()))
        found = list[tuple[int, WorkMessage]]()
        late = list[tuple[int, MPI.Request]]()
        for rank, request in self._coming:
            if any(rank == other for other, _ in late) or (message := request.test()[1]) is None:
                late.append((rank, request))
            else:
                found.append((rank, message))
        self._coming = late
        return found

    def wait(self) -> list[tuple[int, WorkMessage]]:
        """Return what has come, once something has."""
        if not self._coming:
            status = MPI.Status()
            coming = self._comm.mprobe(tag=TAG, status=status)
            self._coming.append((status.source, coming.irecv()))
        rank, request = self._coming.pop(0)
        return [(rank, request.wait()), *self.look()]

    def close(self) -> None:
        """Wait until all that was sent has left."""
        MPI.Request.waitall(self._leaving)


class WorkManager:
    """Rank 0's side. asked: another rank was asked to leave."""

    def __init__(self, comm: Communicator, ranks: Sequence[int], first: Any, work: Work, waiting: Waiting):
        """Give `first` to all of `ranks` but this one, and drop what becomes of it."""
        self._box = _Mailbox(comm)
        self._work = work
        self._waiting = waiting
        self._others = range(1, comm.size)
        self._left = set(self._others)  # who takes part
        self._ahead = {rank: 0 for rank in ranks if rank}  # how many items each has
        self._results = dict[int, WorkMessage]()
        self._open = deque[int]()  # items whose results aren't yielded, in order
        self._count = 0
        self._lived = time.monotonic()
        self.asked = False
        for rank in self._ahead:
            self._give(first, rank)
        self._num_first = self._count

    def results(self, items: Iterable[Any]) -> Iterator[list[Any]]:
        """Yield the parts of each item's result in order; raise its InputError in its place."""
        most = (AHEAD + 2) * (1 + len(self._ahead))
        for item in items:
            self._look()
            yield from self._done()
            while len(self._open) >= most:
                self._wait()
                yield from self._done()
            rank = min(self._ahead, key=self._ahead.__getitem__, default=0)
            if rank and self._ahead[rank] < AHEAD:
                self._give(item, rank)
            else:
                self._do(item)
        while self._open:
            yield from self._done()
            if self._open:
                self._wait()

    def still_works(self) -> bool:
        """Tell the others that rank 0 still works; return whether one was asked to leave."""
        if time.monotonic() - self._lived > BEAT_S:
            self._lived = time.monotonic()
            for rank in self._others:
                self._box.send(WorkMessage(ALIVE), rank)
        self._look()
        return self.asked

    def end(self) -> None:
        """Let the others go, once they have done what they have."""
        for rank in self._others:
            self._box.send(WorkMessage(OVER), rank)
        while self._left:
            self._wait()
        self._box.close()

    def _give(self, item: Any, rank: int) -> None:
        self._box.send(WorkMessage(self._count, item), rank)
        self._ahead[rank] += 1
        self._note()

    def _do(self, item: Any) -> None:
        number = self._count
        self._note()
        self._results[number] = _result(number, item, self._work, self._look)

    def _note(self) -> None:
        self._open.append(self._count)
        self._count += 1

    def _look(self) -> None:
        self._take(self._box.look())

    def _wait(self) -> None:
        with self._waiting("for the ranks that share the work"):
            self._take(self._box.wait())

    def _take(self, messages: Iterable[tuple[int, WorkMessage]]) -> None:
        for rank, message in messages:
            if message.number == OVER:
                self._left.remove(rank)
            elif message.number == ASKED:
                self.asked = True
            else:
                self._results[message.number] = message
                self._ahead[rank] -= 1

    def _done(self) -> Iterator[list[Any]]:
        while self._open and self._open[0] in self._results:
            result = self._results.pop(self._open.popleft())
            if result.error is not None:
                raise result.error
            if result.number >= self._num_first:
                yield result.content


class Worker:
    """The side of every other rank."""

    def __init__(self, comm: Communicator, work: Work, is_asked: Callable[[], bool]):
        self._box = _Mailbox(comm)
        self._work = work
        self._is_asked = is_asked
        self._items = deque[WorkMessage]()
        self._is_over = self._is_asked_sent = False

    def run(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Do what rank 0 gives, until that is over. waiting: for the next item."""
        while self._items or not self._is_over:
            if not self._items:
                with waiting():
                    self._take(self._box.wait())
                continue
            number, item, _ = self._items.popleft()
            self._box.send(_result(number, item, self._work, self._look), 0)
        self._box.send(WorkMessage(OVER), 0)
        self._box.close()

    def _look(self) -> None:
        self._take(self._box.look())

    def _take(self, messages: Iterable[tuple[int, WorkMessage]]) -> None:
        for _, message in messages:
            if message.number == OVER:
                self._is_over = True
            elif message.number != ALIVE:
                self._items.append(message)
        if not self._is_asked_sent and self._is_asked():
            self._is_asked_sent = True
            self._box.send(WorkMessage(ASKED), 0)


def _result(number: int, item: Any, work: Work, look: Callable[[], None]) -> WorkMessage:
    """Return the parts that `work` makes of an item, or its InputError; call `look` after each."""
    parts = []
    try:
        for part in work(item):
            parts.append(part)
            look()
    except InputError as error:
        return WorkMessage(number, error=error)
    return WorkMessage(number, parts)

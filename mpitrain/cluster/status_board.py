"""Where each rank of a node is, in memory that its watchdog reads even if the rank is stuck.

    slot  of one rank, in a file of its own that is only memory (memfd); two notes: the one that is
          valid, and the one written next
    note  checksum, number, state, rank, process, since when, limit, step, position, where what it
          waits for stands, the newest step that is saved, and texts: who, phase, what, what it does
          beside; and of a wait that lasts: for what, for which ranks, and their instructions

A rank writes its own slot, without locks, and its notes in turn: one of the two is whole at any
moment, even where the rank was stopped or killed while it wrote. A reader takes the newer one whose
checksum is right; the order of the stores says nothing, as processors reorder them.

Standard library only: the watchdog starts in milliseconds.
"""

import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from mmap import mmap
from typing import NamedTuple
from zlib import crc32

SLOT = 2048  # bytes
_NOTE = SLOT // 2
RETRIES = 10_000
_CHECKSUM = struct.Struct("<I")
_HEAD = struct.Struct("<qqqqqdqqqqH")
_TEXT = _NOTE - _CHECKSUM.size - _HEAD.size

# WORKING: may take its limit. BUSY: as long as it computes, reads or writes. WAITING: for other
# ranks. HUNG: gave up a wait. LEFT: ends in good order.
MOST_WAITED_ON = 64  # ranks that a wait names
ABSENT, WORKING, BUSY, WAITING, HUNG, LEFT = range(6)
AT_WORK = (WORKING, BUSY, LEFT)
NOT_KNOWN = -1  # which step is saved: a command without checkpoints, or nobody has looked yet
FIRST_PHASE = "start"


class ExpectedInstruction(NamedTuple):
    """An instruction that other ranks have to run, and its place in their programs, or -1."""

    instruction: str = ""
    position: int = -1


NOTHING_EXPECTED = ExpectedInstruction()


@dataclass(frozen=True)
class Where:
    """A slot as it was read. since: seconds of time.monotonic(), which all processes of a host share.

    waits_for: the message or the sum that it has waited for, for a while.
    waiting_on: ranks that have to do `expected` for it; none: its own device has.
    saved: the newest step that is saved, 0 if none is.
    """

    state: int
    rank: int
    pid: int
    since: float
    limit_s: float
    step: int
    position: int
    who: str
    phase: str
    what: str
    waits_for: str = ""
    waiting_on: tuple[int, ...] = ()
    expected: ExpectedInstruction = NOTHING_EXPECTED
    meanwhile: str = ""
    saved: int = NOT_KNOWN

    def __str__(self) -> str:
        return self.describe("")

    def describe(self, verb: str) -> str:
        """Return the place in words, with what the rank did there."""
        at = f" at step {self.step}, position {self.position}," if self.step else ""
        meanwhile = f", meanwhile {self.meanwhile}" if self.meanwhile else ""
        return f"{self.who}{verb}{at} in phase {self.phase}, {self.what}{meanwhile}"


class RankStatus:
    """Where this rank is. `take` moves it to a slot that others can see.

    meanwhile: what a thread of this rank does.  saved: the newest step.  Threads may set both: the
    next note tells them.
    """

    def __init__(self, rank: int = 0, who: str = "", limit_s: float = 0.0):
        self._slot = memoryview(bytearray(SLOT))
        self._number = 0
        self._pid = os.getpid()
        self.rank = rank
        self.who = who or f"rank {rank}"
        self.limit_s = limit_s
        self.phase = FIRST_PHASE
        self.what = "starting"
        self.state = WORKING
        self.meanwhile = ""
        self.saved = NOT_KNOWN
        self.step = self.position = 0
        self._waits_no_more()
        self._write()

    def take(self, slot: memoryview) -> None:
        """Continue in another slot."""
        self._slot = slot
        self._write()

    def name(self, who: str, limit_s: float) -> None:
        """Say how reports call this rank, and how long it may stay where it is."""
        self.who = who
        self.limit_s = limit_s
        self._write()

    def moved(self, step: int, position: int, what: str) -> None:
        """Note the next instruction of a step."""
        self.step = step
        self.position = position
        self.what = what
        self._waits_no_more()
        self._write()

    def waits_for(self, what: str, waiting_on: Sequence[int], expected: tuple[str, int]) -> None:
        """Note what this rank has waited for, for a while. It doesn't move by that."""
        self._waits = what
        self._waiting_on = tuple(waiting_on[:MOST_WAITED_ON])
        self._expected = ExpectedInstruction(*expected)
        self._write(self._since)

    def waits_no_more(self) -> None:
        """Note that a wait is over."""
        self._waits_no_more()
        self._write()

    def _waits_no_more(self) -> None:
        self._waits = ""
        self._waiting_on = ()
        self._expected = NOTHING_EXPECTED

    def enter(self, phase: str, what: str, state: int = WORKING) -> None:
        """Note what this rank does from now on."""
        self.phase = phase
        self.what = what
        self.state = state
        self._write()

    @contextmanager
    def at(self, phase: str, what: str, state: int = WORKING) -> Iterator[None]:
        """Note what this rank does in the block. An error leaves the note: it says where the error was."""
        before = self.phase, self.what, self.state
        self.enter(phase, what, state)
        yield
        self.enter(*before)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Note that this rank waits for others in the block."""
        with self.at(self.phase, what, WAITING):
            yield

    def read(self) -> Where:
        return read_slot(self._slot)

    def _write(self, since: int | None = None) -> None:
        waiting_on = " ".join(map(str, self._waiting_on))
        expected = self._expected
        texts = self.who, self.phase, waiting_on, expected.instruction
        text = "\0".join((*texts, self.meanwhile, self._waits, self.what))
        text = text.encode(errors="replace")[:_TEXT]
        self._number = self._number + 1
        self._since = since or time.monotonic_ns()
        head = self._number, self.state, self.rank, self._pid, self._since
        place = self.limit_s, self.step, self.position, expected.position, self.saved
        content = _HEAD.pack(*head, *place, len(text)) + text
        begin = self._number % 2 * _NOTE
        self._slot[begin : begin + _CHECKSUM.size + len(content)] = _CHECKSUM.pack(crc32(content)) + content


def with_saved(report: str, saved: int) -> str:
    """Return a report whose last line says which step is saved, if that is known."""
    if saved == NOT_KNOWN:
        return report
    return f"{report}; {f'step {saved} is saved' if saved else 'no step is saved yet'}"


def shared_slot() -> tuple[int, memoryview]:
    """Return a slot that other processes can see, and the descriptor to give them. Raises OSError."""
    descriptor = os.memfd_create("mpitrain-slot", os.MFD_CLOEXEC)
    os.truncate(descriptor, SLOT)
    return descriptor, seen_slot(descriptor)


def seen_slot(descriptor: int) -> memoryview:
    """Return the slot that a descriptor was given for."""
    return memoryview(mmap(descriptor, SLOT))


def read_slot(slot: memoryview) -> Where:
    """Return what a slot says; ABSENT where nothing ever wrote."""
    for _ in range(RETRIES):  # both notes are torn only where the rank wrote twice meanwhile
        notes = [note for note in (_whole(slot[:_NOTE]), _whole(slot[_NOTE:])) if note]
        if notes:
            _number, state, rank, pid, since, *place, expected_at, saved, text = max(notes)
            texts = [*text.decode(errors="replace").split("\0"), *[""] * 7]
            who, phase, waiting_on, expected, meanwhile, waits, what = texts[:7]
            wait = waits, tuple(map(int, waiting_on.split())), ExpectedInstruction(expected, expected_at)
            return Where(state, rank, pid, since / 1e9, *place, who, phase, what, *wait, meanwhile, saved)
    return Where(ABSENT, -1, 0, 0.0, 0.0, 0, 0, "a rank that has not reported yet", FIRST_PHASE, "")


def _whole(note: memoryview) -> tuple | None:
    """Return the fields of a note, or None: it is being written, or was torn."""
    content = bytes(note)
    (checksum,) = _CHECKSUM.unpack_from(content)
    *head, length = _HEAD.unpack_from(content, _CHECKSUM.size)
    end = _CHECKSUM.size + _HEAD.size + length
    return (*head, content[end - length : end]) if crc32(content[_CHECKSUM.size : end]) == checksum else None

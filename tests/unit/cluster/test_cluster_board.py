"""Where a rank is, read by another process at any moment."""

import os
import signal
import time
from itertools import count
from mmap import mmap

from conftest import WITH_LONG

from mpitrain.cluster.status_board import ABSENT, BUSY, SLOT, WAITING, WORKING, RankStatus, read_slot


def test_a_slot_says_what_was_written():
    slot = memoryview(bytearray(SLOT))
    place = RankStatus(3, "rank 3 of 8", 60.0)
    place.take(slot)
    place.enter("save", "writing a shard of step 20", BUSY)
    where = read_slot(slot)
    assert (where.state, where.rank, where.limit_s, where.phase) == (BUSY, 3, 60.0, "save")
    assert str(where) == "rank 3 of 8 in phase save, writing a shard of step 20"


def test_a_place_comes_back_after_a_block_but_not_after_an_error():
    place = RankStatus(0, "rank 0 of 1")
    place.enter("step", "between two steps")
    with place.at("save", "writing"), place.waiting("for all ranks"):
        assert (place.read().phase, place.read().state) == ("save", WAITING)
    assert (place.read().phase, place.read().state, place.read().what) == (
        "step",
        WORKING,
        "between two steps",
    )
    try:
        with place.at("save", "writing"):
            raise OSError
    except OSError:
        assert place.read().phase == "save"


def test_long_and_odd_texts_fit():
    place = RankStatus(0, "rank 0")
    place.enter("tokens", "preparing the tokens of " + "\u00e4\udcff" * 2000)
    assert place.read().what.startswith("preparing the tokens of \u00e4?")


def test_a_rank_that_is_killed_while_it_writes_leaves_its_place_before_that():
    """Every prefix of the next note, as a kill may leave it; and a slot in which nobody ever wrote."""
    slot = memoryview(bytearray(SLOT))
    assert read_slot(slot).state == ABSENT
    place = RankStatus(2, "rank 2", 5.0)
    place.take(slot)
    place.moved(7, 3, "F0@1")
    before = bytes(slot)
    place.moved(8, 4, "B0@1, longer than that")
    after = bytes(slot)
    changed = [at for at in range(SLOT) if before[at] != after[at]]
    for at in range(changed[0] + 1, changed[-1] + 1):
        where = read_slot(memoryview(after[:at] + before[at:]))
        assert (where.step, where.position, where.what) == (7, 3, "F0@1")
    assert read_slot(memoryview(after)).what == "B0@1, longer than that"


def test_no_reader_sees_a_slot_half_written():
    """Whoever read one moment's time with another's text, or zeros, would report a rank that is well.

    Two processes, as in a run.
    """
    memory = mmap(-1, SLOT)
    writer = os.fork()
    if not writer:
        place = RankStatus(0, "rank 0", 5.0)
        place.take(memoryview(memory))
        for number in count(1):
            place.moved(number, number, f"F{number}@0" + "x" * (number % 300))
    try:
        while not read_slot(memoryview(memory)).step:
            time.sleep(0.001)
        found = [read_slot(memoryview(memory)) for _ in range(100_000 if WITH_LONG else 30_000)]
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert len({where.step for where in found}) > 20, "nothing was written meanwhile"
    assert [
        w
        for w in found
        if w.step != w.position or not w.what.startswith(f"F{w.step}@0") or w.since < 1 or w.limit_s != 5
    ] == []


def test_a_report_names_what_another_thread_does_meanwhile():
    place = RankStatus(1, "rank 1")
    place.meanwhile = "syncing shard-00001.h5"
    place.enter("step", "B2@1")
    assert (
        place.read().describe(" failed")
        == "rank 1 failed in phase step, B2@1, meanwhile syncing shard-00001.h5"
    )
    place.meanwhile = ""
    place.enter("step", "B3@1")
    assert str(place.read()) == "rank 1 in phase step, B3@1"

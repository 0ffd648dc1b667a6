"""The thread of a rank that lives from its first line to its end: it hears signals and the watchdog.

Until the watchdog of the node knows which ranks there are, and where there is none, it watches the
rank's own limit.
"""

import os
import signal
import threading
import time
from contextlib import suppress

from mpitrain.cluster.activity import Activity
from mpitrain.cluster.hang_analysis import MOST_NAMED
from mpitrain.cluster.launch import elsewhere
from mpitrain.cluster.leave_requests import ASKS, LeaveRequests
from mpitrain.cluster.processes import CONDITIONS, condition
from mpitrain.cluster.status_board import WAITING, RankStatus
from mpitrain.cluster.watchdog_client import WATCHDOG_S, WatchdogClient, ready
from mpitrain.cluster.watchdog_messages import ASKED
from mpitrain.comm.base.world import STARTING
from mpitrain.errors import FAILED, STOPPED_EARLY

LOOK_S = 0.25
THREAD = "mpitrain-guard"
TERM_S = 3.0  # Open MPI sends SIGTERM when another rank has failed, SIGKILL 2 s later
STAGGER_S = 1.5  # without a watchdog first ranks speak first, and end the job before others do
SAVES_FIRST = "the run ends after this step, with a checkpoint; a second Ctrl-C ends it at once, without"


class ListeningThread(threading.Thread):
    """start() raises RuntimeError if no thread can be started."""

    def __init__(self, place: RankStatus, requests: LeaveRequests, watchdog: WatchdogClient):
        super().__init__(name=THREAD, daemon=True)
        self._place = place
        self._requests = requests
        self._watchdog = watchdog
        self._activity = Activity()

    def run(self) -> None:
        """Listen for ever."""
        watchdog = self._watchdog
        while True:
            known = watchdog.connection
            watched = known is not None and watchdog.joined
            ears = [watchdog.wakes, *([] if known is None else [known.fileno()])]
            readable = ready(ears, self._patience_s(watched))
            if watchdog.wakes in readable:
                self._take_signals(os.read(watchdog.wakes, 512))
            if known is not None and known.fileno() in readable:
                watchdog.hear(known)
            elif not watched:
                self._watch_limit()
            if self._requests.is_overdue(self._phase) and watchdog.undelivered is None:
                self._leave_now()
            watchdog.look_at(time.monotonic())

    @property
    def _phase(self) -> str:
        return self._place.read().phase

    def _patience_s(self, watched: bool) -> float:
        if not watched or self._watchdog.undelivered is not None:
            return LOOK_S
        return self._requests.due_s(LOOK_S, WATCHDOG_S)

    def _take_signals(self, numbers: bytes) -> None:
        """Count a request to leave, and say what the rank does."""
        asked = [number for number in numbers if number in ASKS]
        if not asked:
            return
        at_once = self._requests.count(asked, self._phase)
        silent = at_once or self._requests.saves_nothing(self._phase)
        said = f"mpitrain: asked to leave ({signal.Signals(asked[0]).name}): {SAVES_FIRST}"
        with suppress(OSError):
            self._watchdog.tell(ASKED, asked[0], "" if silent else said)
        if not self._watchdog.joined and signal.SIGTERM in numbers:
            time.sleep(TERM_S)
        if at_once:
            self._leave_now()

    def _leave_now(self) -> None:
        where = self._place.read().describe(self._requests.describe())
        report = f"mpitrain: {where}; checkpoints are intact; run the same command to resume"
        self._watchdog.end_job(report, STOPPED_EARLY)

    def _watch_limit(self) -> None:
        where = self._place.read()
        for_s = self._activity.idle_s(where, time.monotonic())
        if for_s > where.limit_s + STAGGER_S * (self._place.rank.bit_length() + (where.state == WAITING)):
            how = f"waits for other ranks{_absent()}" if where.state == WAITING else "is stuck"
            limit = f"the limit is {where.limit_s:g} s (comm.timeout_s)"
            self._watchdog.end_job(f"mpitrain: {where}: {how}, for {for_s:.0f} s; {limit}", FAILED)


def _absent() -> str:
    """Name the ranks of this node that don't wait in MPI_Init, for one that does."""
    pids = sorted(elsewhere(STARTING).items())[:MOST_NAMED]
    why = ((rank, CONDITIONS.get(condition(pid), "it does something else")) for rank, pid in pids)
    missing = [f"rank {rank} has not arrived: {words}" for rank, words in why]
    return f" ({'; '.join(missing)})" if missing else ""

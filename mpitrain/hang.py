"""What a rank says before it ends the job: where it was, what it waited for, and who is behind.

A rank that waited too long leaves a note in the run directory. A moment later the first of the waiting ranks reads all notes and
reports: ranks without a note don't wait for a message, so they are the ones the others wait for.
"""

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from mpitrain.comm.world import abort
from mpitrain.errors import HangError, MpitrainError
from mpitrain.rundir import RunDir

GATHER_S = 3.0  # the ranks' limits end at almost the same moment; time for the last to leave its note


@contextmanager
def diagnosed(actor, rundir: RunDir) -> Iterator[None]:
    """End the whole job with exit code 1 and the coordinates and instruction of this rank if the steps fail here."""
    try:
        yield
    except HangError as error:
        _report_hang(actor, rundir, error)
        abort()
    except BaseException as error:
        step, position, action = actor.cursor
        # A shard that cannot be written is one rank's alone: also an InputError has to end the others here.
        expected = isinstance(error, MpitrainError) or not isinstance(error, Exception)
        text = "" if expected else traceback.format_exc()
        sys.stderr.write(f"{text}mpitrain: {actor.mesh} failed at step {step}, position {position}, {action}: {error!r}\n")
        abort()


def _report_hang(actor, rundir: RunDir, error: HangError) -> None:
    step, position, action = actor.cursor
    folder = rundir.hang
    folder.mkdir(exist_ok=True)
    where = {"step": step, "position": position, "action": str(action)}
    note = {"rank": actor.mesh.rank, "who": str(actor.mesh), **where, "why": str(error)}
    (folder / f"rank-{actor.mesh.rank:05d}.json").write_text(json.dumps(note))
    time.sleep(GATHER_S)
    notes = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
    if notes[0]["rank"] == actor.mesh.rank:
        sys.stderr.write(hang_report(notes, actor.mesh.size) + "\n")
    else:
        time.sleep(GATHER_S)  # the first rank speaks and aborts


def hang_report(notes: list[dict], num_ranks: int) -> str:
    """Return one line per waiting rank and name the first rank behind."""
    lines = [f"mpitrain: {n['who']} at step {n['step']}, position {n['position']}, {n['action']}: {n['why']}" for n in notes]
    silent = sorted(set(range(num_ranks)) - {note["rank"] for note in notes})
    if silent:
        ranks = ", ".join(map(str, silent[:8]))
        lines.append(f"mpitrain: first behind: rank {ranks} waits for no message; it computes, is stuck or is gone")
    else:
        behind = min(notes, key=lambda note: (note["step"], note["position"]))
        where = f"step {behind['step']}, position {behind['position']}, {behind['action']}"
        lines.append(f"mpitrain: first behind: {behind['who']} at {where}")
    return "\n".join(lines)

"""Processes of a job as others read them in /proc.

Slurm's trackers, batch systems and `ps | awk` split a line at white space.
"""

import re
from pathlib import Path

from conftest import LONG
from launch import MPITRAIN, lines_in, started, tail, tiny, write_text

# the other rank waits in MPI_Init
LATE = 'case "$PMI_RANK$OMPI_COMM_WORLD_RANK" in 1) sleep 1.5;; esac; exec "$0" "$@"'


@LONG
def test_every_process_of_a_job_has_a_name_of_one_word_in_every_phase(tmp_path):
    """Slurm's proctrack/linuxproc and proctrack/pgid read "%ld %s %c %ld".

    They never signal a process that this doesn't match.
    """
    run_dir = tmp_path / "run"
    seen = set()
    options = tiny(run_dir, write_text(tmp_path / "text.txt"), run_steps=200, parallel_pp=2)
    with started(2, "sh", "-c", LATE, MPITRAIN, "run", *options, forked=False) as job:

        def stepping():
            seen.update(_lines(job._pids()))
            return lines_in(run_dir) > 20

        job.wait_for(stepping, 60)
        ranks = _lines(job.ranks())
        done = job.wait(60)
    assert done.returncode == 0, tail(done.output)
    unread = [line for line in seen if not re.fullmatch(rb"\d+ \(\S+\) [A-Za-z] \d+ .*\n", line)]
    assert not unread, unread
    # it was looked at inside MPI_Init, too
    assert any(b"mpitrain:init" in line for line in seen), seen
    assert ranks and all(line.split()[1] == b"(mpitrain)" for line in ranks if b"watchdog" not in line), ranks


def _lines(pids: list[int]) -> list[bytes]:
    """Return /proc/PID/stat of processes, but for those that ended meanwhile."""
    found = []
    for pid in pids:
        try:
            found.append(Path(f"/proc/{pid}/stat").read_bytes())
        except OSError:
            continue
    return found

"""The end of an allocation is what the scheduler says, in whatever form, or the user's own limit,
if that is earlier.

Commands of schedulers that aren't here are small scripts that print what the manuals show.
"""

import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
from launch import MPITRAIN, environment, finished

from mpitrain.cluster.allocation import (
    FIRST_PROCESS_NAMESPACE,
    End,
    age_s,
    end_after,
    end_of_allocation,
    now,
    seconds_of,
)
from mpitrain.config import load
from mpitrain.errors import ConfigError

SOON_S = 15.0  # what a loaded machine may take between two looks at its clock
QSTAT = """Job Id: 12.server
    Job_Name = mpitrain
    resources_used.walltime = 00:10:00
    Resource_List.select = 2:ncpus=4
    Resource_List.walltime = {limit}
    stime = {start}
    Variable_List = PBS_O_HOME=/home/me"""


def command(folder, name, *answers, code=0):
    """Put a command on the path that prints `answers`, and what it was called with into a file."""
    text = "\n".join(answers)
    (folder / name).write_text(
        f"#!/bin/sh\necho \"$@\" >>{folder}/{name}.called\ncat <<'END'\n{text}\nEND\nexit {code}\n"
    )
    (folder / name).chmod(0o755)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A folder for commands, in which scontrol says that this host is one of the job's nodes: IN_SLURM."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    command(tmp_path, "scontrol", "elsewhere", socket.gethostname().partition(".")[0])
    return tmp_path


IN_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "those,this"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12:00:00", 43200),
        ("0:00:01", 1),
        ("2-00:00:05", 172805),
        ("100:30:00", 361800),
        ("1-01:01:01", 90061),
    ],
)
def test_a_time_limit_is_read(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["12h", "90", "12:00", "1:60:00", "1:00:61", "-1:00:00", "1:00:00 ", "١:00:00", "inf", "0:00:00"]
)
def test_another_form_of_a_time_limit_is_refused(text):
    with pytest.raises(ConfigError, match="expected hours:minutes:seconds"):
        seconds_of(text)


@pytest.mark.parametrize(
    ("variables", "name", "answer", "asked", "left_s"),
    [
        (IN_SLURM, "squeue", "7 1-02:03:04", "-h -j 7 -o %A %L", 93784),
        (IN_SLURM, "squeue", "7 9:30", "-h -j 7 -o %A %L", 570),
        # the last of an array
        (IN_SLURM, "squeue", "17 1:00\n9 9:30\n7 1:10\n8 2:00", "-h -j 7 -o %A %L", 70),
        ({"FLUX_JOB_ID": "f7"}, "flux", "3599", "job timeleft", 3599),
        ({"LSB_JOBID": "7"}, "bjobs", "3:30 L", "-noheader -o time_left 7", 12600),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "0"}, "bjobs", "3:30 L", "-noheader -o time_left 7", 12600),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "3"}, "bjobs", "3:30 L", "-noheader -o time_left 7[3]", 12600),
    ],
)
def test_a_scheduler_is_asked(path, variables, name, answer, asked, left_s):
    command(path, name, answer)
    end = end_of_allocation("", variables)
    assert left_s - SOON_S < end.left_s <= left_s and end.source.startswith(name)
    assert (path / f"{name}.called").read_text() == f"{asked}\n"


def test_pbs_reports_the_start_and_the_walltime(path):
    start = time.time() - 600
    command(path, "qstat", QSTAT.format(limit="04:00:00", start=time.ctime(start)))
    end = end_of_allocation("", {"PBS_JOBID": "12.server"})
    assert end.source == "qstat" and abs(end.left_s - (start + 14400 - time.time())) < 1


def test_torque_reports_the_walltime_only():
    end = end_of_allocation("", {"PBS_WALLTIME": "3600"})
    assert abs(end.left_s - (3600 - age_s())) < 1 and end.source == "PBS_WALLTIME"


@pytest.mark.parametrize(
    ("variables", "name", "answer", "code"),
    [
        ({}, "squeue", "7 1:00", 0),
        (IN_SLURM, "squeue", "7 UNLIMITED", 0),
        (IN_SLURM, "squeue", "8 1:00", 0),
        (IN_SLURM, "squeue", "7 1:00", 1),
        ({"FLUX_JOB_ID": "f7"}, "flux", str(2**32 - 1), 0),  # UINT_MAX: no limit
        ({"LSB_JOBID": "7"}, "bjobs", "-", 0),
        ({"PBS_JOBID": "7"}, "qstat", QSTAT.format(limit="forever", start=time.ctime()), 0),
        (IN_SLURM | {"SLURM_JOB_END_TIME": "soon"}, "squeue", "", 0),
        # of an allocation that is over
        (IN_SLURM | {"SLURM_JOB_END_TIME": "1000000000"}, "squeue", "7 UNLIMITED", 0),
    ],
)
def test_where_nobody_says_there_is_no_end(path, variables, name, answer, code):
    command(path, name, answer, code=code)
    assert end_of_allocation("", variables) is None


@pytest.mark.parametrize(
    ("variables", "name", "answer"),
    [
        (IN_SLURM | {"SLURM_JOB_END_TIME": "9" * 17}, "squeue", ""),
        # more digits than Python makes an integer of
        (IN_SLURM | {"SLURM_JOB_END_TIME": "9" * 5000}, "squeue", ""),
        ({"PBS_WALLTIME": "9" * 17}, "qstat", ""),
        ({"PBS_WALLTIME": "9" * 5000}, "qstat", ""),
        ({"PBS_JOBID": "7"}, "qstat", QSTAT.format(limit=f"{'9' * 17}:00:00", start=time.ctime())),
        ({"PBS_JOBID": "7"}, "qstat", QSTAT.format(limit=f"{'9' * 5000}:00:00", start=time.ctime())),
    ],
    ids=lambda value: "",
)
def test_an_end_beyond_all_calendars_is_left_out_with_a_word(path, variables, name, answer):
    command(path, name, answer)
    notes = []
    assert end_of_allocation("", variables, notes.append) is None
    assert len(notes) == 1 and notes[0].endswith("after the year 9999: ignored"), notes
    assert end_of_allocation("0:30:00", variables, notes.append).source == "run.time_limit"


@pytest.mark.parametrize(
    ("variables", "name", "answer"),
    [
        (IN_SLURM, "squeue", f"7 {'9' * 5000}-00:00:00"),
        ({"FLUX_JOB_ID": "f7"}, "flux", "9" * 5000),
        ({"LSB_JOBID": "7"}, "bjobs", f"{'9' * 5000}:00 L"),
    ],
    ids=lambda value: "",
)
def test_more_than_a_century_left_is_no_limit(path, variables, name, answer):
    command(path, name, answer)
    assert end_of_allocation("", variables) is None


NO_ENDS = [
    "9" * 17,
    "9" * 5000,
    "1790000000000",
    "nan",
    "inf",
    "-1",
    "soon",
    "1790000000.5",
    " 1790000000",
    "١٧٩٠٠٠٠٠٠٠",
]


@pytest.mark.parametrize("text", NO_ENDS, ids=lambda text: text[:20])
def test_an_end_of_the_users_own_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match=r"MPITRAIN_JOB_END = .*expected seconds since 1970"):
        end_of_allocation("", {"MPITRAIN_JOB_END": text})


def test_the_last_second_of_the_year_9999_is_an_end():
    end = end_of_allocation("", {"MPITRAIN_JOB_END": "253402300799"})
    # the latter east of Greenwich
    assert str(end).startswith(("9999-12-31", "10000-01-01")) and end.source == "MPITRAIN_JOB_END"


def test_a_scheduler_without_its_command_says_nothing():
    assert end_of_allocation("", {"FLUX_JOB_ID": "f7", "PATH": "/nowhere"}) is None


def test_the_earlier_of_two_ends_counts(path):
    begin = int(time.time())
    said = {**IN_SLURM, "SLURM_JOB_END_TIME": str(begin + 3600)}
    end = end_of_allocation("", said)
    assert end.source == "SLURM_JOB_END_TIME" and abs(end.left_s - (begin + 3600 - time.time())) < 1
    assert end_of_allocation("0:30:00", said).source == "run.time_limit"
    assert end_of_allocation("2:00:00", said).source == "SLURM_JOB_END_TIME"
    assert end_of_allocation("", said | {"MPITRAIN_JOB_END": str(begin + 60)}).source == "MPITRAIN_JOB_END"


def test_a_limit_counts_from_the_start_of_the_process():
    code = (
        "import time; time.sleep(1); from mpitrain.cluster.allocation import end_of_allocation; import os\n"
    )
    code += "print(end_of_allocation('1:00:00', {}).left_s)"
    done = finished([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert 3600 - SOON_S - 1 < float(done.stdout) < 3599


# ---------------------------------------------------------------- whose end it is

SAYS = "from mpitrain.cluster.allocation import end_of_allocation; print(end_of_allocation('', note=print))"


def said_by_a_process(folder, shell, **variables):
    """Return what a Python below `shell` finds: a real process, with real ones above it."""
    given = {"SLURM_JOB_ID": "4711", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600), **variables}
    command = [str(shell), "-c", f'"{sys.executable}" -c "{SAYS}"; true']
    return subprocess.run(
        command, cwd=folder, env=environment(**given), capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.mark.skipif(
    os.readlink("/proc/self/ns/pid") != FIRST_PROCESS_NAMESPACE,
    reason="a container: nobody sees who started it",
)
def test_an_end_that_a_shell_inherited_from_another_job_of_slurm_is_ignored(path):
    command(path, "squeue", "4711 9:30")
    ignored = (
        "the end of Slurm's job 4711 is ignored: this process isn't in that job, it only inherited its "
        "variables"
    )
    for variables in ({}, {"SLURM_JOB_END_TIME": ""}, {"SLURM_JOB_NODELIST": "a[1-3]"}):
        command(path, "scontrol", "a1", "a2", "a3")
        said = said_by_a_process(path, "/bin/sh", **variables)
        assert said.startswith(ignored) and said.endswith("None\n"), said
    own = said_by_a_process(path, "/bin/sh", MPITRAIN_JOB_END=str(int(time.time()) + 60))
    assert own.endswith("(MPITRAIN_JOB_END)\n")


def test_a_process_below_slurmstepd_is_in_the_job(path):
    shutil.copy("/bin/sh", path / "slurmstepd")
    assert said_by_a_process(path, path / "slurmstepd").endswith("(SLURM_JOB_END_TIME)\n")


def test_a_process_on_a_node_of_the_job_is_in_the_job(path):
    """A launcher that starts ranks by ssh leaves no slurmstepd above them."""
    assert said_by_a_process(path, "/bin/sh", SLURM_JOB_NODELIST="those,this").endswith(
        "(SLURM_JOB_END_TIME)\n"
    )


# ---------------------------------------------------------------- clocks


def test_an_end_is_kept_on_a_clock_that_nobody_sets(monkeypatch, path):
    """The time of day jumps: two days forward, then back."""
    command(path, "flux", "3599")
    day = 86400
    time_of_day = time.time
    said = (
        {"MPITRAIN_JOB_END": str(int(time.time()) + 3600)},
        {"FLUX_JOB_ID": "f7"},
        {"PBS_WALLTIME": "3600"},
        {},
    )
    ends = [end_of_allocation("1:00:00" if not variables else "", variables) for variables in said]
    for jump in (2 * day, -2 * day):
        monkeypatch.setattr(time, "time", lambda jump=jump: time_of_day() + jump)
        assert all(3600 - SOON_S - age_s() < end.left_s <= 3600 for end in ends), [end.left_s for end in ends]


def test_an_end_says_how_far_it_is_before_it_and_after_it():
    assert end_after(71.0, "a test").distance().startswith("71 s before 20") and str(
        end_after(0, "a test")
    ).endswith(" (a test)")
    assert End(now() - 284, "a test").distance().startswith("284 s after 20")


# ---------------------------------------------------------------- as it is typed


def test_a_limit_on_the_command_line_is_no_hour_of_the_day():
    assert (
        load(None, ["run.time_limit=12:00:00"]).run.time_limit
        == load(None, ['run.time_limit="12:00:00"']).run.time_limit
        == "12:00:00"
    )


@pytest.mark.parametrize("option", ["--time-limit=12h", "--set=run.time_limit=12h"])
def test_a_wrong_limit_is_refused_before_anything_is_made(tmp_path, option):
    done = finished(
        [MPITRAIN, "run", option], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stderr.startswith(
        'ConfigError: run.time_limit = "12h": expected hours:minutes:seconds'
    )
    assert not list(tmp_path.iterdir())


def test_a_wrong_end_is_refused_before_anything_is_made(tmp_path):
    given = dict(
        cwd=tmp_path, env=environment(MPITRAIN_JOB_END="9" * 17), capture_output=True, text=True, timeout=60
    )
    done = finished([MPITRAIN, "run"], **given)
    assert done.returncode == 2 and done.stderr.startswith(
        f'ConfigError: MPITRAIN_JOB_END = "{"9" * 17}": expected seconds'
    ), done.stderr
    assert not list(tmp_path.iterdir())

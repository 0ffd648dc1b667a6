"""One run at a time in a run directory."""

import errno
import itertools
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import msgspec
import pytest
from conftest import LONG, WITH_LONG
from launch import MPITRAIN, lines_in, loss_lines, mpirun, patience, run_tiny, started, tail, tiny, write_text

from mpitrain.cluster import lock as locks
from mpitrain.cluster.lock import NAME, Lock, Owner, read_owner
from mpitrain.cluster.rundir import RunDir
from mpitrain.errors import CheckpointError


def nothing(*_):
    return None


def never(text):
    raise AssertionError(text)


@pytest.fixture
def quick(monkeypatch):
    """Let seconds be tenths."""
    monkeypatch.setattr(locks, "BEAT_S", 0.2)
    monkeypatch.setattr(locks, "GONE_S", 1.5)
    monkeypatch.setattr(locks, "LOOK_S", 0.05)


def left_behind(folder: Path, **changes) -> Owner:
    """Write the lock of a holder that is no more."""
    lock = Lock(folder, never)
    owner = msgspec.structs.replace(lock._owner, pid=2**22 + 1, born="1", **changes)
    (folder / NAME).write_bytes(msgspec.json.encode(owner))
    return owner


# ---------------------------------------------------------------- the lock alone


def test_a_held_lock_names_its_holder(tmp_path):
    held = Lock(tmp_path, never)
    assert held.take(nothing) == ""
    with pytest.raises(
        CheckpointError, match=rf"is in use by process {os.getpid()} on {socket.gethostname()}, started"
    ):
        Lock(tmp_path, never).take(nothing)
    held.release()
    assert not list(tmp_path.iterdir())


def test_a_dead_holder_of_this_host_is_taken_over_at_once_and_said(tmp_path):
    left_behind(tmp_path)
    fresh = Lock(tmp_path, never)
    said = fresh.take(nothing)
    assert "process 4194305" in said and said.endswith("which has ended: lock taken over")
    assert read_owner(tmp_path / NAME).token == fresh.token
    fresh.release()
    assert not list(tmp_path.iterdir())


def test_an_earlier_holder_of_the_same_job_is_not_watched(tmp_path):
    left_behind(tmp_path, system="another host", token="a1b2")
    lock = Lock(tmp_path, never, "a1")
    assert "taken over" in lock.take(never)
    lock.release()
    left_behind(tmp_path, system="another host", token="c3")
    with pytest.raises(AssertionError, match="is process 4194305 "):
        Lock(tmp_path, never, "a1").take(never)


def test_a_process_with_the_number_of_a_dead_holder_is_another(tmp_path):
    owner = left_behind(tmp_path)
    (tmp_path / NAME).write_bytes(msgspec.json.encode(msgspec.structs.replace(owner, pid=os.getpid())))
    lock = Lock(tmp_path, never)
    assert "taken over" in lock.take(nothing)
    lock.release()


def test_a_holder_on_another_host_that_gives_no_sign_of_life_is_taken_over(tmp_path, quick):
    left_behind(tmp_path, host="far", system="another boot")
    said = []
    lock = Lock(tmp_path, never)
    assert "on far" in lock.take(said.append)
    assert len(said) > 3  # the others are told all the while that this rank still works
    lock.release()


def test_a_holder_on_another_host_that_beats_is_respected(tmp_path, quick):
    owner = left_behind(tmp_path, host="far", system="another boot")
    over = threading.Event()

    def beat():
        number = 0
        while not over.wait(0.2):
            number += 1
            (tmp_path / NAME).write_bytes(
                msgspec.json.encode(msgspec.structs.replace(owner, beat=str(number)))
            )

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(CheckpointError, match="in use by process 4194305 on far"):
        Lock(tmp_path, never).take(nothing)
    over.set()
    thread.join()


@LONG
def test_a_holder_whose_signs_of_life_are_held_up_by_the_file_system_is_respected(
    tmp_path, quick, monkeypatch
):
    """Longer than a holder may be still, nobody can write, and whoever looks waits as well."""
    owner = left_behind(tmp_path, host="far", system="another boot")
    answers = threading.Event()
    over = threading.Event()
    monkeypatch.setattr(locks, "SLOW_S", 1.0)
    calls = itertools.count()  # the first makes the file that is written again at each look
    monkeypatch.setattr(locks.os, "fsync", lambda file: next(calls) and answers.wait())

    def beat():
        time.sleep(3.0)
        answers.set()
        time.sleep(0.7)  # time enough to take over, for who doesn't begin anew
        while not over.wait(0.2):
            sign = msgspec.structs.replace(owner, beat=str(time.monotonic()))
            (tmp_path / "sign").write_bytes(msgspec.json.encode(sign))
            (tmp_path / "sign").replace(tmp_path / NAME)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="in use by process 4194305 on far"):
            Lock(tmp_path, never).take(nothing)
    finally:
        over.set()
        thread.join()


def test_a_look_on_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    left_behind(tmp_path)

    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(locks.os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"run\.lock cannot be written: No space left on device"):
        Lock(tmp_path, never).take(nothing)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_at_once_one_gets_it(tmp_path, stale):
    """Also of many who all find the last holder gone: threads, as hosts of one file system."""
    for _ in range(15):
        if stale:
            left_behind(tmp_path)
        got = []
        barrier = threading.Barrier(8)

        def attempt(got=got, barrier=barrier):
            lock = Lock(tmp_path, never)
            barrier.wait()
            try:
                lock.take(nothing)
            except CheckpointError:
                return
            got.append(lock)

        threads = [threading.Thread(target=attempt) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        assert read_owner(tmp_path / NAME).token == got[0].token
        got[0].release()
        assert not list(tmp_path.iterdir())


def test_a_holder_whose_lock_was_taken_is_notified(tmp_path, quick):
    noted = threading.Event()
    lock = Lock(tmp_path, lambda text: noted.set())
    lock.take(nothing)
    left_behind(tmp_path, host="far")
    assert noted.wait(patience(5))


def test_a_sign_of_life_is_not_written_over_another_lock(tmp_path, quick, monkeypatch):
    """It is taken after the holder has looked whose it is, and before it writes."""
    noted, lock, decode = threading.Event(), Lock(tmp_path, lambda text: noted.set()), msgspec.json.decode
    fresh = msgspec.json.encode(
        msgspec.structs.replace(lock._owner, token="another", host="far", job="a longer record")
    )

    def decode_and_be_taken(content, **kind):
        found = decode(content, **kind)
        if found.token == lock.token:
            (tmp_path / "fresh").write_bytes(fresh)
            (tmp_path / "fresh").replace(tmp_path / NAME)
        return found

    lock.take(nothing)
    monkeypatch.setattr(locks.msgspec.json, "decode", decode_and_be_taken)
    assert noted.wait(patience(5))
    assert (tmp_path / NAME).read_bytes() == fresh


def test_a_lock_that_is_not_seen_for_a_moment_is_not_lost(tmp_path, quick, monkeypatch):
    lock = Lock(tmp_path, never)
    opened = locks.open_regular
    missed = threading.Event()

    def open_but_once(path, *flags):
        if path == lock.path and not missed.is_set():
            missed.set()
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return opened(path, *flags)

    lock.take(nothing)
    monkeypatch.setattr(locks, "open_regular", open_but_once)
    assert missed.wait(patience(5))
    beat = lock._beat
    while lock._thread.is_alive() and lock._beat < beat + 2:
        time.sleep(0.05)
    assert lock._thread.is_alive() and read_owner(tmp_path / NAME).token == lock.token
    lock.release()
    assert not list(tmp_path.iterdir())


def test_the_lock_of_whoever_has_taken_it_is_left_alone(tmp_path):
    lock = Lock(tmp_path, never)
    lock.take(nothing)
    other = left_behind(tmp_path, host="far")
    lock.release()
    assert read_owner(tmp_path / NAME) == other


def test_a_damaged_lock_is_refused(tmp_path):
    (tmp_path / NAME).write_bytes(b"{")
    with pytest.raises(CheckpointError, match=r"run\.lock is damaged"):
        Lock(tmp_path, never).take(nothing)


HOSTILE = {
    "a token that is a path": {"token": "../../outside"},
    "a token with NUL": {"token": "a\0b"},
    "an empty token": {"token": ""},
    "a long token": {"token": "a" * 5000},
    "a number of all processes": {"pid": -1},
    "a number of no process": {"pid": 2**63},
    "a long host": {"host": "h" * 5000},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_lock_that_no_run_writes_is_refused(tmp_path, quick, case):
    owner = msgspec.to_builtins(left_behind(tmp_path))
    (tmp_path / NAME).write_text(json.dumps(owner | HOSTILE[case]))
    with pytest.raises(CheckpointError, match=r"run\.lock is damaged") as caught:
        Lock(tmp_path, never).take(nothing)
    assert str(caught.value).isprintable() and [path.name for path in tmp_path.iterdir()] == [NAME]


def test_what_a_lock_says_reaches_no_terminal_as_it_is(tmp_path, quick):
    evil = "\x1b]0;title\x07\nCheckpointError: faked\u2028"
    left_behind(tmp_path, host=evil, user=evil, since=evil, job=evil)
    lock = Lock(tmp_path, never)
    assert lock.take(nothing).isprintable()
    lock.release()
    owner = left_behind(tmp_path, host=evil, user=evil)
    (tmp_path / NAME).write_bytes(
        msgspec.json.encode(msgspec.structs.replace(owner, pid=os.getpid(), born=lock._owner.born))
    )
    with pytest.raises(CheckpointError, match="is in use by") as caught:
        Lock(tmp_path, never).take(nothing)
    assert str(caught.value).isprintable()


NO_LOCKS = ["FIFO", "link to a device", "link to a file", "sparse", "deep", "folder"]
AFTER = f"{NAME}.after-"
NAMES = [
    *((name, what) for name in (NAME, AFTER) for what in NO_LOCKS),
    (AFTER, "itself"),
    (AFTER, "a circle"),
]


@pytest.mark.parametrize(("name", "what"), NAMES)
def test_what_is_no_lock_is_neither_read_nor_waited_for(tmp_path, quick, name, what):
    """Also where one would say who has taken over from a holder that is gone."""
    folder = tmp_path / "run"
    outside = tmp_path / "outside"
    folder.mkdir()
    owner = left_behind(folder)
    outside.write_bytes(msgspec.json.encode(msgspec.structs.replace(owner, token="secret", host="secret")))
    path = folder / (name if name == NAME else f"{name}{owner.token}")
    path.unlink(missing_ok=True)
    if what == "FIFO":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what.startswith("link"):
        path.symlink_to(outside if what == "link to a file" else "/dev/zero")
    elif what == "sparse":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    elif what == "deep":
        path.write_text("[" * 100_000)
    elif what == "itself":
        path.write_bytes(msgspec.json.encode(owner))
    else:
        other = msgspec.structs.replace(owner, token="other")
        path.write_bytes(msgspec.json.encode(other))
        (folder / f"{NAME}.after-other").write_bytes(msgspec.json.encode(owner))
    before = sorted(folder.iterdir())
    begin = time.monotonic()
    with pytest.raises(CheckpointError, match=r"is damaged|names a run that has ended|cannot be") as caught:
        Lock(folder, never).take(nothing)
    assert str(caught.value).isprintable() and "secret" not in str(caught.value)
    assert time.monotonic() - begin < 5 and sorted(folder.iterdir()) == before


def test_a_lock_that_becomes_a_fifo_holds_up_neither_the_run_nor_its_end(tmp_path, quick):
    lock = Lock(tmp_path, never)
    lock.take(nothing)
    lock.path.unlink()
    os.mkfifo(lock.path)
    time.sleep(0.6)
    beat = lock._beat
    time.sleep(0.6)
    assert lock._thread.is_alive() and lock._beat > beat
    ending = threading.Thread(target=lock.release, daemon=True)
    ending.start()
    ending.join(5)
    assert not ending.is_alive(), "it waits for a writer"


def test_a_sign_of_life_is_not_written_through_a_link(tmp_path, quick):
    run = tmp_path / "run"
    victim = tmp_path / "victim"
    run.mkdir()
    lock = Lock(run, never)
    lock.take(nothing)
    victim.write_bytes(lock.path.read_bytes())
    lock.path.unlink()
    lock.path.symlink_to(victim)
    before = victim.read_bytes()
    time.sleep(0.6)
    lock.release()
    assert victim.read_bytes() == before


def test_a_holder_of_a_damaged_lock_continues_and_ends(tmp_path, quick):
    lock = Lock(tmp_path, never)
    lock.take(nothing)
    (tmp_path / NAME).write_bytes(b"{")
    time.sleep(0.6)
    assert lock._thread.is_alive()
    lock.release()


def test_who_is_refused_leaves_the_data_of_the_run_that_is_there(tmp_path):
    """It was there first, but had no data yet when the other one looked."""
    first = RunDir(tmp_path / "run")
    second = RunDir(tmp_path / "run")
    first.take(never, nothing)
    second._fresh_data = True
    first.data.mkdir()
    (first.data / "tokens.bin").write_bytes(b"tokens")
    with pytest.raises(CheckpointError, match="in use by"):
        second.take(never, nothing)
    second._fresh_data = True
    second.undo()
    assert (first.data / "tokens.bin").read_bytes() == b"tokens"
    first.release()
    assert not list((tmp_path / "run").glob("run.lock*"))


# ---------------------------------------------------------------- runs


def test_of_jobs_started_at_once_one_runs_and_the_others_say_who(tmp_path):
    num_jobs = 5 if WITH_LONG else 3
    text = write_text(tmp_path / "text.txt")
    run_dir = tmp_path / "run"
    done = [None] * num_jobs

    def start(number):
        done[number] = run_tiny(1, run_dir, text, run_steps=40, run_save_every=5, timeout=180)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(num_jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ran = [job for job in done if "done: 40 steps" in job.output]
    refused = [job for job in done if job.returncode == 2]
    assert ran and len(ran) + len(refused) == num_jobs, "\n".join(tail(job.output) for job in done)
    assert all(
        job.output.count("CheckpointError: ") == 1 and "is in use by process" in job.output for job in refused
    )
    assert lines_in(run_dir) == 40
    assert [json.loads(line)["step"] for line in loss_lines(run_dir)] == list(range(41))
    assert not list(run_dir.glob("run.lock*"))


@LONG
def test_a_run_that_was_killed_is_taken_over_and_said(tmp_path):
    text = write_text(tmp_path / "text.txt")
    run_dir = tmp_path / "run"
    given = tiny(run_dir, text, run_steps=60, run_save_every=5, parallel_pp=2)
    with started(2, MPITRAIN, "run", *given) as job:
        job.wait_for(lambda: (run_dir / "checkpoints" / "step-00000005").exists(), 60)
        for rank in job.ranks():
            job.signal(rank, signal.SIGSTOP)  # or it may be done before the second has started
        second = mpirun(1, MPITRAIN, "run", *tiny(run_dir, text, run_steps=20))
        assert second.returncode == 2, tail(second.output)
        assert f"is in use by process {job.ranks()[0]}" in second.output, tail(second.output)
        for rank in job.ranks():
            job.signal(rank, signal.SIGKILL)
        job.kill()
    done = mpirun(2, MPITRAIN, "run", *given)
    assert (
        done.returncode == 0
        and "which has ended: lock taken over" in done.output
        and "resuming after step" in done.output
    ), tail(done.output)

"""One run at a time in a run directory: a lock that network file systems keep, too.

    run.lock                who holds it: token, host, process, since when, and a number that goes
                            up every BEAT_S
    run.lock.after-<token>  who takes over from the holder of that token, which is gone

A file is made under its name by link(), which is atomic on every file system that clusters have;
flock() and O_EXCL are not. A holder on this host is gone if its process is. One on another host is
gone if its number stays the same for GONE_S, in which whoever looks could write all the time: no
clocks of two hosts are compared. A holder that finds its lock taken ends its job.

Where a job lives on when a rank has died, its ranks know that an earlier holder of the same job is gone.
"""

import errno
import getpass
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from mpitrain.cluster.launch import job_of_scheduler
from mpitrain.cluster.processes import no_more, stat_of
from mpitrain.errors import CheckpointError
from mpitrain.inputs import decoded, open_regular, read_regular, shown

NAME = "run.lock"
BEAT_S = 5.0
GONE_S = 30.0
LOOK_S = 0.5
SLOW_S = 5.0  # a look that takes longer says nothing: the holder's signs may be held up as well
LOOKS = 3
WITHOUT_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
NO_LOCK = (errno.EINVAL, errno.EFBIG, errno.ELOOP)  # of what is no file, too large, a link
BEATS = 12  # digits: the file is written over in place, which a full disk allows
MOST_BYTES = 1 << 14  # of a lock, which has 400
MOST_GONE = 8  # who took over, one from the other, and are gone

Text = Annotated[str, Meta(max_length=1024)]


class Owner(msgspec.Struct, frozen=True):
    """Who holds a lock, read from a file that anybody may have written.

    token: part of a file's name.  system: the boot and the process namespace, in which `pid` means
    something.  born: the process's start.
    """

    token: Annotated[str, Meta(pattern="^[0-9a-z]{1,64}$")]
    host: Text
    system: Text
    pid: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    born: Text
    user: Text
    since: Text
    job: Text = ""
    beat: Text = ""

    def __str__(self) -> str:
        started = f"started {shown(self.since)} by {shown(self.user)}"
        job = f", job {shown(self.job)}" if self.job else ""
        return f"process {self.pid} on {shown(self.host)}, {started}{job}"


class Lock:
    """The lock of one run directory, held by this process from take() to release().

    lost: called, on a thread, when it was taken away.
    job: begins the tokens of this job's locks, if a rank that has died is all that can hold one of them.
    """

    def __init__(self, folder: Path, lost: Callable[[str], object], job: str = ""):
        self.path = folder / NAME
        self.token = job + uuid.uuid4().hex
        self._job = job
        self._lost = lost
        self._over = threading.Event()
        self._beat = 0
        self._thread: threading.Thread | None = None
        self._owner = Owner(
            token=self.token,
            host=socket.gethostname(),
            system=_system(),
            pid=os.getpid(),
            born=_born(os.getpid()),
            user=user(),
            since=time.strftime("%Y-%m-%d %H:%M:%S %z"),
            job=job_of_scheduler(),
        )

    def take(self, still_waiting: Callable[[str], object]) -> str:
        """Take the lock; return what is to be said if its last holder is gone.

        still_waiting: called with a text, again and again, while a holder on another host is watched for
        signs of life.  Raises CheckpointError that names a living holder.
        """
        try:
            said = self._take(still_waiting)
        except OSError as error:
            why = f"{NAME} cannot be written: {error.strerror}"
            advice = "free some space or choose another run.dir"
            raise CheckpointError(f"run.dir = {shown(self.path.parent)}: {why}; {advice}") from None
        self._thread = threading.Thread(target=self._keep, name="mpitrain-lock", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None
            self.release()
            raise CheckpointError(
                f"run.dir = {self.path.parent}: no thread can be started to keep {NAME}; {no_more()}"
            ) from None
        return said

    @contextmanager
    def held(self, still_waiting: Callable[[str], object], say: Callable[[str], object]) -> Iterator[None]:
        """Hold the lock for the block; say if its last holder is gone. Raises as take() does."""
        said = self.take(still_waiting)
        try:
            if said:
                say(said)
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Give the lock back, if it is still held."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        try:
            owner = read_owner(self.path)
            if owner is not None and owner.token == self.token:
                self.path.unlink()
        except (OSError, CheckpointError):
            return  # gone, read-only, damaged: the next run finds this process gone, or says so

    def _take(self, still_waiting: Callable[[str], object]) -> str:
        mine = self.path.with_name(f"{NAME}.{self.token}")
        said = ""
        try:
            _write(mine, os.O_CREAT | os.O_EXCL, self._record())
            while not said and not _linked(mine, self.path):
                said = self._take_over(mine, still_waiting)
        finally:
            mine.unlink(missing_ok=True)
        return said

    def _take_over(self, mine: Path, still_waiting: Callable[[str], object]) -> str:
        """Take the place of a holder that is gone; return what to say, "" if the lock has changed."""
        first = owner = read_owner(self.path)
        path = self.path
        taken = False
        gone = set[str]()
        while owner is not None and not taken:
            gone.add(owner.token)
            if not (self._job and owner.token.startswith(self._job)):
                _require_gone(owner, path, mine, still_waiting)
            # of all who find a holder gone, one can make this file
            path = self.path.with_name(f"{NAME}.after-{owner.token}")
            taken = _linked(mine, path)
            owner = owner if taken else read_owner(path)  # who was first, perhaps gone by now
            if owner is not None and not taken and (owner.token in gone or len(gone) == MOST_GONE):
                what = f"{shown(path.name)} names a run that has ended, again and again"
                raise _to_remove(path, what, f"{NAME}*")
        if not taken:
            return ""
        now = read_owner(self.path)
        if now is None or now.token != first.token:  # who was first has finished
            path.unlink()
            return ""
        mine.replace(self.path)
        for path in self.path.parent.glob(f"{NAME}.after-*"):
            with suppress(IsADirectoryError, PermissionError):  # no run has made that
                path.unlink(missing_ok=True)
        return f"run.dir was in use by {first}, which has ended: lock taken over"

    def _record(self) -> bytes:
        owner = msgspec.structs.replace(self._owner, beat=f"{self._beat:0{BEATS}}")
        return msgspec.json.encode(owner) + b"\n"

    def _keep(self) -> None:
        """Give a sign of life every BEAT_S; end the job if another has taken the lock."""
        while not self._over.wait(BEAT_S):
            self._beat += 1
            try:
                owner = self._give_sign()
            except (OSError, ValueError):  # it may answer later; a damaged lock keeps everybody out
                continue
            if not self._over.is_set() and (owner is None or owner.token != self.token):
                how = f"taken by {owner}" if owner else "removed"
                self._lost(f"{shown(self.path)} was {how}: two runs would write into one directory")
                return

    def _give_sign(self) -> Owner | None:
        """Write a sign of life into the lock, if it is this one's; return whose it is."""
        for _ in range(LOOKS):
            try:
                # the one that is read: who takes the lock puts another there
                with open(open_regular(self.path, os.O_RDWR), "r+b") as file:
                    owner = decoded(file.read(MOST_BYTES), Owner)
                    if owner.token == self.token:
                        file.seek(0)
                        file.write(self._record())
                return owner
            except FileNotFoundError:  # what a network file system may say for a moment
                time.sleep(LOOK_S)
        return None


def read_owner(path: Path) -> Owner | None:
    """Return who a lock file names; None without one. Raises CheckpointError if it is damaged."""
    for _ in range(LOOKS):  # where files can't be linked, one is seen empty for a moment
        try:
            return decoded(read_regular(path, MOST_BYTES), Owner)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in NO_LOCK:
                raise
            raise _to_remove(path, f"{shown(path.name)} is damaged, {error.strerror}") from None
        except ValueError:
            time.sleep(LOOK_S)
    raise _to_remove(path, f"{shown(path.name)} is damaged, it doesn't say who uses the directory")


def _to_remove(path: Path, what: str, files: str = "the file") -> CheckpointError:
    advice = f"see that no run uses the directory, and remove {files}"
    return CheckpointError(f"run.dir = {shown(path.parent)}: {what}; {advice}")


def _write(path: Path, flags: int, content: bytes) -> None:
    with open(open_regular(path, os.O_WRONLY | flags), "wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())


def _require_gone(owner: Owner, path: Path, mine: Path, still_waiting: Callable[[str], object]) -> None:
    """Raise CheckpointError if a holder lives.

    mine: a file beside its own, written again at each look. A file server that doesn't answer for a
    while holds up the holder's signs of life, and this file, too: the time begins anew.
    """
    if owner.system == _system():
        lives = _born(owner.pid) == owner.born
    else:
        lives = False
        since = time.monotonic()
        content = read_regular(mine, MOST_BYTES)
        while not lives and time.monotonic() - since < GONE_S:
            begin = time.monotonic()
            still_waiting(f"is {owner} alive?")
            time.sleep(LOOK_S)
            _write(mine, 0, content)
            now = read_owner(path)
            if now is None or now.token != owner.token:
                return  # no longer its lock: to be tried again
            lives = now.beat != owner.beat
            if time.monotonic() - begin > SLOW_S:
                since = time.monotonic()
    if lives:
        raise CheckpointError(
            f"run.dir = {shown(path.parent)} is in use by {owner}; wait until it ends, or choose another "
            "run.dir"
        )


def _linked(mine: Path, name: Path) -> bool:
    """Give a file a second name; return False if there is such a file."""
    try:
        os.link(mine, name)
    except FileExistsError:
        return False
    except OSError as error:
        if os.stat(mine).st_nlink == 2:  # NFS: the answer was lost, not the link (open(2), O_EXCL)
            return True
        if error.errno not in WITHOUT_LINKS:
            raise
        try:
            _write(name, os.O_CREAT | os.O_EXCL, read_regular(mine, MOST_BYTES))
        except FileExistsError:
            return False
    return True


def _system() -> str:
    """Return what tells whether a process number of another lock means a process that this one can see."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()  # not Linux


def _born(pid: int) -> str:
    """Return when a process started, in ticks since the boot; "": none. Numbers are reused."""
    if not os.path.exists("/proc/self/stat"):
        return _lives(pid)
    try:
        fields = stat_of(pid).fields
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def _lives(pid: int) -> str:
    """Return the same for every process that is there, where no birth can be asked for."""
    try:
        with suppress(PermissionError):
            os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    return "there"


def user() -> str:
    """Return who runs this process."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())

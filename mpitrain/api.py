"""A run from a script or a notebook: open it, step it, read its state.

    # mpirun -n 2 python mine.py
    from mpitrain import api

    with api.open_run("tiny.toml", "parallel.pp=2", "run.dir=runs/mine") as run:
        for line in run.steps():
            if run.rank == 0:
                print(line["step"], line["loss"])
        weight = run.array("parameters/embedding.weight")

It is the run of `mpitrain run`: the same bits, files, messages, limits, checkpoints, and the same
end when a rank fails. All ranks call the same methods in the same order, within the block, by one
thread at a time, in the process that opened the run. A child that it forks ends where it leaves the
block.
"""

import os
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NoReturn

from mpitrain.cluster import entry, std_streams
from mpitrain.cluster.guard import Guard, is_guarded
from mpitrain.cluster.status_board import BUSY, LEFT
from mpitrain.comm.base.world import is_finalized
from mpitrain.errors import DONE, FAILED, ConfigError, on_all_ranks, suggestion
from mpitrain.inputs import shown

if TYPE_CHECKING:
    import numpy as np

    from mpitrain.comm.mesh import Mesh
    from mpitrain.config import Config
    from mpitrain.plan.plan import Plan
    from mpitrain.training.trainer import Trainer
    from mpitrain.training.trainers import Trainers


@contextmanager
def open_run(path: str | None = None, *overrides: str) -> Iterator["OpenRun"]:
    """Start MPI, prepare or resume a run, and end both with the block.

    Collective over all ranks of the job. path: of a TOML file; None: the quickstart.
    overrides: as after --set, "parallel.pp=2".

    An error that all ranks have (bad input, a time limit) is printed once, and the process ends with
    its exit code; any other, in the block too, ends the job with one report (cluster/guard.py).
    Raises ConfigError outside of the main thread, and in a process that has opened a run.
    """
    _require_first(path, overrides)
    entry.settle_libraries()
    std_streams.settle()
    guard = Guard()
    code = DONE
    try:
        with ExitStack() as stack:
            run = _opened(path, overrides, guard, stack)
            guard.place.enter("step", "in the script, between two steps", BUSY)
            with _forks_end():
                yield run
            code = run.end()
    except GeneratorExit:  # Python ends, perhaps: no thread can start to write a report
        guard.place.enter("end", "leaving", LEFT)
        _end_process("mpitrain: open_run: its block was never left; use it in a with statement")
    except BaseException as error:
        code = guard.answer(error, entry.report_error)
    guard.leave(code)
    if code != DONE:
        sys.exit(code)


def _require_first(path: object, overrides: tuple[object, ...]) -> None:
    """Raise ConfigError where no run can be opened, before anything of this process is changed."""
    if not isinstance(path, str | os.PathLike | None):
        raise ConfigError(f"open_run: found {shown(path)}; give the path of a TOML file, or None")
    if is_guarded():
        before = "this process has opened a run before, and MPI starts only once in a process"
        raise ConfigError(f"open_run: {before}; start another process for another run")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("open_run: called in a thread, which hears no signals; use the main thread")
    for override in overrides:
        if not isinstance(override, str):
            raise ConfigError(f'open_run: found {shown(override)}; give text, such as "run.steps=3"')


def _opened(path: str | None, overrides: tuple[str, ...], guard: Guard, stack: ExitStack) -> "OpenRun":
    from mpitrain.training.prepare import open_run as prepare

    prepared, world = prepare(path, overrides, guard)
    stack.enter_context(prepared.rundir)
    guard.place.enter("build", "loading torch", BUSY)
    from mpitrain.training.trainers import Trainers

    trainers = stack.enter_context(Trainers(prepared, world, guard))
    return OpenRun(trainers, stack.enter_context(ExitStack()))


@contextmanager
def _forks_end() -> Iterator[None]:
    """End a child that was forked in the block where it leaves it: MPI is the parent's to end."""
    owner = os.getpid()
    code: object = "mpitrain: a forked child left the block of open_run; end it by os._exit()"
    try:
        yield
    except BaseException as error:
        if os.getpid() == owner:
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        code = error.code if isinstance(error, SystemExit) else FAILED
    if os.getpid() != owner:
        _end_process(code)


def _end_process(code: object) -> None:
    """End this process as sys.exit(code) does, without its exit handlers."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or DONE) & 0xFF)


class _Door:
    """Lets one thread at a time call methods of a run, in its process, within the block."""

    def __init__(self):
        self._owner = os.getpid()
        self._inside = threading.Lock()
        self.shut = False

    @contextmanager
    def within(self, method: str) -> Iterator[None]:
        """Hold the run for a method. Raises ConfigError where it can't be called."""
        why = ""
        if os.getpid() != self._owner:
            why = "in a process that was forked, and isn't a rank; call it in the rank itself"
        elif self.shut:
            why = "after the end of the run; call it within the block of open_run"
        elif is_finalized():
            why = "after MPI was finalised; leave that to the end of the block"
        elif not self._inside.acquire(blocking=False):
            why = "while another thread is in a method; let one thread call them"
        if why:
            raise ConfigError(f"OpenRun.{method}: called {why}")
        try:
            yield
        finally:
            self._inside.release()


class OpenRun:
    """A run that is open, on one rank. Made by open_run(). live: takes the terminal's line."""

    def __init__(self, trainers: "Trainers", live: ExitStack):
        self._trainers = trainers
        self._live = live
        self._stepping: Iterator[dict] | None = None
        self._failed: BaseException | None = None
        self._code: int | None = None  # when it has ended
        self._door = _Door()

    def __reduce__(self) -> NoReturn:
        raise ConfigError("OpenRun: can't be copied or pickled, it is of one process; take array(name)")

    @property
    def _trainer(self) -> "Trainer":
        return self._trainers.now

    @property
    def rank(self) -> int:
        return self._trainer.mesh.rank

    @property
    def config(self) -> "Config":
        """The whole configuration: what was asked for, and what was derived from it."""
        return self._trainer.config

    @property
    def plan(self) -> "Plan":
        """What follows from the configuration, in integers: programs, stages, buckets, traffic."""
        return self._trainer.plan

    @property
    def mesh(self) -> "Mesh":
        """The communicators of this rank, one an axis."""
        return self._trainer.mesh

    @property
    def step(self) -> int:
        """The number of steps done."""
        return self._trainer.counts.step

    def steps(self) -> Iterator[dict]:
        """Run the steps that are left up to run.steps, each when it is asked for. Collective.

        Yields what metrics.jsonl has of it. The loop may be left, and continued by another call;
        steps after the last one saved (run.save_every) are lost with the block. A run that has to
        leave early (a signal, its time) saves, and yields no more.
        """
        while (line := self._next_line()) is not None:
            yield line

    def _next_line(self) -> dict | None:
        """Run one step; None after the last. One that fails ends the job with the block at the latest."""
        with self._door.within("steps()"):
            try:
                while (line := next(self._lines(), None)) is None and self._trainer.is_followed:
                    self._live.close()
                    self._stepping = None
                    self._trainers.advance()
                return line
            except BaseException as error:
                self._failed = error
                raise

    def _lines(self) -> Iterator[dict]:
        """Return the steps of the trainer that is there, begun if they weren't."""
        if self._stepping is None:
            self._trainer.begin()
            self._live.enter_context(self._trainer.report)
            self._stepping = self._trainer.steps()
        return self._stepping

    def validate(self) -> float:
        """Return the mean loss over the validation sequences. Collective over all ranks."""
        with self._door.within("validate()"):
            return self._trainer.validate(tasks=False)["val_loss"]

    def arrays(self) -> list[str]:
        """Return the names of what a checkpoint of this run holds: weights, moments. Collective."""
        with self._door.within("arrays()"):
            return self._names()

    def array(self, name: str) -> "np.ndarray":
        """Return a weight or a moment, whole, on every rank, as index.h5 of a checkpoint has it.

        name: one of arrays(). Collective over all ranks. The array is the caller's.
        Raises ConfigError, alike on all ranks, for a name that no rank has.
        """
        import numpy as np

        name = str(name)  # whatever it is, the message below says that there is none
        with self._door.within("array()"):
            parts = self._parts_of_ranks(name)
        whole = np.empty(parts[0][1].global_shape, parts[0][0].dtype)
        for array, extent in parts:
            where = (slice(begin, begin + n) for begin, n in zip(extent.offset, array.shape, strict=True))
            whole[tuple(where)] = array
        return whole

    def _names(self) -> list[str]:
        names_of_ranks = self._trainer.world.all_gather("the names of arrays", list(self._parts()))
        return sorted({name for names in names_of_ranks for name in names})

    def _parts_of_ranks(self, name: str) -> list:
        mine = self._parts().get(name, ())
        parts_of_ranks = self._trainer.world.all_gather(f"the parts of {name}", mine)
        parts = [part for rank_parts in parts_of_ranks for part in rank_parts]
        if not parts:
            hint = suggestion(name, self._names(), "OpenRun.arrays() has the names")
            raise on_all_ranks(ConfigError(f"no array is called {name}; {hint}"))
        return parts

    def end(self) -> int:
        """End what is under way, say how it went if it is over; return the exit code. Collective."""
        if self._code is None:
            with self._door.within("end()"):
                self._door.shut = True
                self._code = self._ended()
        return self._code

    def _ended(self) -> int:
        if self._failed is not None:
            raise self._failed
        trainer = self._trainer
        self._live.close()
        over = trainer.code is not None or trainer.counts.step == self.config.run.steps
        if self._stepping is not None and over:
            from mpitrain.training.run_end import finish

            return finish(trainer)
        trainer.saver.finish()  # a step may still be written
        return DONE

    def _parts(self) -> dict:
        from mpitrain.training.saving.state_io import Snapshot

        self._trainer.actor.settle()
        return dict(Snapshot(self._trainer.actor, copied=False).parts())

"""A run from a script or a notebook: open it, step it, read its state.

    # mpirun -n 2 python mine.py
    from mpitrain import api

    with api.open_run("tiny.toml", "parallel.pp=2", "run.dir=runs/mine") as run:
        for line in run.steps():
            if run.rank == 0:
                print(line["step"], line["loss"])
        weight = run.array("parameters/embedding.weight")

A run that is stepped here is the run of `mpitrain run`: the same bits, files, messages, limits, checkpoints,
and the same end when a rank fails. All ranks call the same methods in the same order.
"""

import difflib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from mpitrain.cluster import entry, std_streams
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.status_board import BUSY
from mpitrain.errors import DONE, ConfigError

if TYPE_CHECKING:
    import numpy as np

    from mpitrain.comm.mesh import Mesh
    from mpitrain.config import Config
    from mpitrain.plan.plan import Plan
    from mpitrain.training.trainer import Trainer


@contextmanager
def open_run(path: str | None = None, *overrides: str) -> Iterator["OpenRun"]:
    """Start MPI, prepare a run or go on with it, and end both with the block.

    Collective over all ranks of the job. MPI starts once, so a process opens one run.

    path: of a TOML file; None: the quickstart.
    overrides: as behind --set, "parallel.pp=2".

    An error that all ranks have (bad input, a time limit) is printed once, and the process ends with its exit
    code; any other error of a rank, in the block too, ends the whole job with one report (cluster/guard.py).
    """
    entry.settle_libraries()
    std_streams.settle()
    guard = Guard()
    code = DONE
    try:
        with ExitStack() as stack:
            run = _opened(path, overrides, guard, stack)
            guard.place.enter("step", "in the script, between two steps", BUSY)
            yield run
            code = run.end()
    except BaseException as error:
        code = guard.answer(error, entry.report_error)
    guard.leave(code)
    if code != DONE:
        sys.exit(code)


def _opened(path: str | None, overrides: tuple[str, ...], guard: Guard, stack: ExitStack) -> "OpenRun":
    from mpitrain.commands.plan.run_layout import choose_layout
    from mpitrain.training.prepare import open_run as prepare

    prepared, world = prepare(path, overrides, guard, choose_layout)
    stack.enter_context(prepared.rundir)
    guard.place.enter("build", "loading torch", BUSY)
    from mpitrain.training.trainer import built

    trainer = stack.enter_context(built(prepared, world, guard))
    return OpenRun(trainer, stack.enter_context(ExitStack()))


class OpenRun:
    """A run that is open, on one rank. Made by open_run().

    live: is given the line on a terminal that shows the steps.
    """

    def __init__(self, trainer: "Trainer", live: ExitStack):
        self._trainer = trainer
        self._live = live
        self._stepping: Iterator[dict] | None = None

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
        return self._trainer.step

    def steps(self) -> Iterator[dict]:
        """Run the steps that are left up to run.steps, each when it is asked for.

        Yields what metrics.jsonl has of it. Collective over all ranks. The loop may be left, and gone on
        with by another call; what comes after the last step that was saved (run.save_every) is lost with
        the block. A run that has to leave early (a signal, its time) saves, and yields no more.
        """
        if self._stepping is None:
            self._trainer.begin()
            self._live.enter_context(self._trainer.report)
            self._stepping = self._trainer.steps()
        yield from self._kept(self._stepping)

    @staticmethod
    def _kept(stepping: Iterator[dict]) -> Iterator[dict]:
        """Yield from an iterator without closing it when the loop is left."""
        for line in stepping:  # noqa: UP028
            yield line

    def validate(self) -> float:
        """Return the mean loss over the validation sequences. Collective over all ranks."""
        return self._trainer.validate()["val_loss"]

    def arrays(self) -> list[str]:
        """Return the names of what a checkpoint of this run holds: weights, moments. Collective."""
        mine = list(self._parts())
        return sorted({name for each in self._gathered("the names of arrays", mine) for name in each})

    def array(self, name: str) -> "np.ndarray":
        """Return a weight or a moment, whole, on every rank, as index.h5 of a checkpoint has it.

        name: one of arrays(). Collective over all ranks. The array is the caller's.

        Raises ConfigError, alike on all ranks, for a name that no rank has.
        """
        import numpy as np

        every = self._gathered(f"the parts of {name}", self._parts().get(name, ()))
        parts = [part for each in every for part in each]
        if not parts:
            raise _everywhere(ConfigError(f"no array is called {name}; {_near(name, self.arrays())}"))
        whole = np.empty(parts[0][1].global_shape, parts[0][0].dtype)
        for array, extent in parts:
            where = (slice(begin, begin + n) for begin, n in zip(extent.offset, array.shape, strict=True))
            whole[tuple(where)] = array
        return whole

    def end(self) -> int:
        """End what is under way, and say how it went if the run is over; return the exit code.

        Collective over all ranks. open_run() calls it.
        """
        trainer = self._trainer
        self._live.close()
        over = trainer.code is not None or trainer.step == self.config.run.steps
        if self._stepping is not None and over:
            from mpitrain.commands.plan.after_run import compare

            return trainer.finish(compare)
        trainer.saver.finish()  # a step may still be written
        return DONE

    def _parts(self) -> dict:
        from mpitrain.training.saving.state_io import Snapshot

        self._trainer.actor.settle()
        return dict(Snapshot(self._trainer.actor, copied=False).parts())

    def _gathered(self, what: str, mine: object) -> list:
        return self._trainer.world.all_gather(what, mine)


def _near(name: str, known: list[str]) -> str:
    found = difflib.get_close_matches(name, known, 1)
    return f"did you mean {found[0]}?" if found else "OpenRun.arrays() has the names"


def _everywhere(error: ConfigError) -> ConfigError:
    error.everywhere = True
    return error

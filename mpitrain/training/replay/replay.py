"""`mpitrain replay`: one rank's part in a step, alone, in one process, without MPI: from a recording (recording.py), bit for bit.

The rank's own program runs, on axes where what came from others comes from the file (comm/replay.py). What it gives to others and its
gradients must be what they were; the first that isn't is named, with its instruction.
"""

import bdb
import json
import pdb
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from mpitrain.actor.actor import Actor, Work
from mpitrain.cluster.board import Place
from mpitrain.comm.buffers import Array
from mpitrain.comm.replay import ReplayMesh, fill
from mpitrain.comm.tap import Started
from mpitrain.config import parse
from mpitrain.errors import DONE, FAILED, DataError
from mpitrain.inputs import shown
from mpitrain.model.families.catalog import plan_of
from mpitrain.training.checks.digests import digest
from mpitrain.training.machine import compiler
from mpitrain.training.microbatches import microbatches_of
from mpitrain.training.replay.recording import FORMAT, gradients_of, state_of


class Stops(Place):
    """A place that calls the debugger before an instruction. at: its text."""

    def __init__(self, rank: int, at: str | None):
        super().__init__(rank)
        self._at = at

    def moved(self, step: int, position: int, what: str) -> None:
        super().moved(step, position, what)
        if what == self._at:
            pdb.Pdb().set_trace(sys._getframe(1))  # where the actor walks its program


class Replay:
    """Runs what a file tells. at: the instruction before which the debugger is called, if any. Raises DataError."""

    def __init__(self, path: str, at: str | None = None):
        self._path = path
        try:
            self._file = np.load(path, allow_pickle=False)
            self.about: dict[str, Any] = json.loads(self._file["about"].tobytes())
            known = self.about.get("format") == FORMAT
        except (OSError, ValueError, KeyError, EOFError, AttributeError, BadZipFile) as error:
            why = getattr(error, "strerror", None)
            what = f"{shown(path)}: not a recording that can be read" + (f": {why}" if why else "")
            raise DataError(f"{what}; give a file of mpitrain run --record") from None
        if not known:
            raise DataError(f"{shown(path)}: found {shown(self.about.get('format'))}, needed {FORMAT!r}; record it with this version")
        self.plan = plan_of(parse(tomllib.loads(self.about["config"])))
        torch.set_num_threads(self.about["threads"])
        if self.plan.config.run.compile:
            compiler.require(None if self.about["device"] == "cpu" else "cuda")
        axes, rank = self.plan.axes, self.about["rank"]
        self.place = Stops(rank, at)
        self.mesh = ReplayMesh(rank, axes.of(rank), axes.carried)
        self._given: list[tuple[str, int, str, str, int]] = []
        self.mesh.listen(self, self._fill, self.place)
        self.actor = Actor(self.plan, self.mesh, torch.device(self.about["device"]), place=self.place)
        if at is not None and at not in map(str, self.actor.training):
            raise DataError(f"--stop-at {shown(at)}: rank {rank} has no such instruction; mpitrain program prints those that it has")
        self._restore()

    def run(self, say: Callable[[str], None]) -> int:
        """Run the step up to the update; say whether it is the recorded one, and return the exit code."""
        about, gradients = self.about, list[Sequence]()
        tokens = torch.from_numpy(self._file["tokens"]).to(self.actor.site.device)
        microbatches = microbatches_of(self.actor, tokens, about["separator"])

        def compute_and_look(compute: Callable[[], Work]) -> Work:
            work = compute()
            gradients.extend(list(each) for each in gradients_of(self.actor))
            say(f"loss {work.result.loss:.6f}, norm {work.result.grad_norm:.6f}")
            return work

        self.mesh.listen(self, self._fill, self.place)  # what building has started isn't of the step
        self._given.clear()
        self.actor.run_step(about["step"], microbatches, about["lr"], sure=compute_and_look)
        return self._compare(gradients, say)

    def given(self, which: Started, parts: Sequence[Array]) -> None:
        """Note what this rank gives."""
        self._given.append((*which, digest(parts)))

    def came(self, which: Started, parts: Sequence[Array]) -> None:
        """Nothing comes but from the file."""

    def _fill(self, which: Started, buffers: Sequence[Array]) -> None:
        """Fill buffers with what came. What is started before the step, and after its update, isn't recorded."""
        names = [f"came/{which.axis}/{which.number}/{number}" for number in range(len(buffers))]
        if all(name in self._file for name in names):
            fill([self._file[name] for name in names], buffers)

    def _restore(self) -> None:
        for number, x in enumerate(state_of(self.actor)):
            fill([self._file[f"state/{number}"]], [x.detach().flatten()])
        self.actor.optimizer.set_step(self.about["updates"])
        self.actor.loss_scale.state = tuple(self.about["loss_scale"])

    def _compare(self, gradients: list[Sequence], say: Callable[[str], None]) -> int:
        about = self.about
        given = {tuple(each[:2]): each for each in map(list, self._given)}
        say(f"rank {about['rank']} of {about['size']}, step {about['step']}: {len(about['given'])} operations, {len(gradients)} gradients")
        for axis, number, operation, instruction, wanted in about["given"]:
            found = given.get((axis, number))
            if found is None or found[-1] != wanted:
                say(f"not the same bits: first in {instruction}, what it gives to {operation} {number} of {axis}")
                return FAILED
        wrong = [name for (name, *_, a), (*_, b) in zip(about["gradients"], gradients, strict=True) if a != b]
        if wrong:
            say(f"not the same bits: the gradient of {wrong[0]}, and {len(wrong) - 1} more")
            return FAILED
        say("all that this rank gave to others, and all gradients, have the recorded bits")
        return DONE


def main(path: str, at: str | None, say: Callable[[str], None]) -> int:
    """Replay a file."""
    if not Path(path).is_file():
        raise DataError(f"{shown(path)}: no such file; give a file of mpitrain run --record")
    try:
        return Replay(path, at).run(say)
    except bdb.BdbQuit:
        say("the debugger was left: nothing was compared")
        return FAILED

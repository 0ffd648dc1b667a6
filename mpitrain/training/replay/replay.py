"""`mpitrain replay`: one rank's part in a step, without MPI, from a recording, bit for bit.

What came from others comes from the file (comm/standins/replay.py). What it gives to others and its
gradients must be what they were; the first that isn't is named, with its instruction.
"""

import bdb
import json
import math
import os
import pdb
import struct
import sys
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated, Literal
from zipfile import BadZipFile

import msgspec
import numpy as np
import torch
from msgspec import Meta

from mpitrain.actor.actor import Actor
from mpitrain.actor.step_work import StepRequests, Work
from mpitrain.cluster.status_board import RankStatus
from mpitrain.comm.base.buffers import Array
from mpitrain.comm.standins.replay import ReplayMesh, fill
from mpitrain.comm.tap import TappedOperation
from mpitrain.config import MOST_THREADS, parse
from mpitrain.errors import DONE, FAILED, DataError, DtypeError
from mpitrain.inputs import open_file, shown
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.division.batch_division import sequences_of
from mpitrain.plan.plan import Plan
from mpitrain.training.checks.digests import digest
from mpitrain.training.machine import compiler
from mpitrain.training.replay.recording import FORMAT, gradients_of, state_of

MOST_BYTES = 1 << 50  # of a file, whose arrays are read one by one
MOST_ABOUT_BYTES = 1 << 28
MOST_HEADER_BYTES = 1 << 14
OF_PYTHON = (OSError, ValueError, KeyError, EOFError, MemoryError, RuntimeError)
UNREADABLE = (*OF_PYTHON, BadZipFile, struct.error, zlib.error)

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Stops(RankStatus):
    """A place that calls the debugger before an instruction. at: its text."""

    def __init__(self, rank: int, at: str | None):
        super().__init__(rank)
        self._at = at

    def moved(self, step: int, position: int, what: str) -> None:
        super().moved(step, position, what)
        if what == self._at:
            pdb.Pdb().set_trace(sys._getframe(1))  # where the actor walks its program


class RecordingInfo(msgspec.Struct):
    """What a recording says of itself (recording.py).

    asked: how urgently the rank had to leave, and how far its save was: both travel with the totals.
    given: of each operation axis, number, name, instruction, digest.
    gradients: of each name, first and last element, digest.
    """

    format: str
    config: str
    rank: Count
    size: Count
    step: Count
    lr: float
    updates: Count
    threads: Annotated[int, Meta(ge=1, le=MOST_THREADS)]
    device: Literal["cpu", "cuda"]
    loss_scale: tuple[Annotated[float, Meta(gt=0)], Count]
    given: list[tuple[str, int, str, str, int]]
    gradients: list[tuple[str, int, int, int]]
    separator: Count | None = None  # what ends a document, in older recordings
    asked: tuple[Count, Count] = (0, 0)  # older recordings don't say it
    compiled: bool | None = None  # in older recordings as run.compile says


class Recorded:
    """The arrays of a file, which somebody else may have written. Raises DataError for what no run has."""

    def __init__(self, path: str):
        self._path = path
        try:
            self._file = zipfile.ZipFile(os.fdopen(open_file(path, MOST_BYTES), "rb"))
        except (OSError, ValueError, BadZipFile, NotImplementedError, struct.error) as error:
            raise self.damaged(getattr(error, "strerror", None) or error) from None
        self.names = {name.removesuffix(".npy") for name in self._file.namelist()}

    def damaged(self, why: object) -> DataError:
        """Return the error that says so."""
        what = f"{shown(self._path)}: not a recording that can be read: {shown(why)}"
        return DataError(f"{what}; give a file of mpitrain run --record")

    def read(self, name: str, most_bytes: int) -> np.ndarray:
        """Return an array of at most so many bytes. A recording has it as it is, not packed."""
        try:
            member = self._file.getinfo(f"{name}.npy")
            too_large = member.file_size > most_bytes + MOST_HEADER_BYTES
            if too_large or member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} is packed, or has more than {most_bytes:,} bytes")
            with self._file.open(member) as file:
                return np.lib.format.read_array(file, allow_pickle=False)
        except UNREADABLE as error:
            raise self.damaged(error) from None

    def fill(self, names: Sequence[str], buffers: Sequence[Array]) -> None:
        """Copy arrays over flat buffers."""
        try:
            fill([self.read(name, x.nbytes) for name, x in zip(names, buffers)], buffers)
        except (ValueError, TypeError, DtypeError) as error:
            raise self.damaged(f"{names[0]}: {error.args[0]}") from None

    def about(self) -> RecordingInfo:
        """Return what it says of itself."""
        try:
            tree = json.loads(self.read("about", MOST_ABOUT_BYTES).tobytes())
            version = tree.get("format") if isinstance(tree, dict) else None
            if version != FORMAT:
                what = f"{shown(self._path)}: found {shown(version)}, needed {FORMAT!r}"
                raise DataError(f"{what}; record it with this version")
            about = msgspec.convert(tree, RecordingInfo)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self.damaged(error) from None
        if not (math.isfinite(about.lr) and math.isfinite(about.loss_scale[0])):
            raise self.damaged("lr or loss_scale is not finite")
        return about

    def plan(self, about: RecordingInfo) -> Plan:
        """Return the plan of the run. Raises ConfigError, too."""
        try:
            plan = plan_of(parse(tomllib.loads(about.config)))
        except (ValueError, RecursionError) as error:
            raise self.damaged(error) from None
        if about.size != plan.axes.grid.size or about.rank >= about.size:
            raise self.damaged(f"rank {about.rank} of {about.size}, in a layout of {plan.axes.grid.size}")
        return plan

    def tokens(self, plan: Plan) -> np.ndarray:
        """Return the tokens of the rank: [sequences, tokens of a sequence and the one that follows]."""
        config = plan.config
        shape = self._shape(plan)
        tokens = self.read("tokens", 8 * math.prod(shape))
        known = tokens.dtype.kind in "iu" and tokens.shape == shape
        if not known or tokens.min() < 0 or tokens.max() >= config.model.vocab:
            raise self.damaged(f"tokens are not {list(shape)} numbers below {config.model.vocab:,}")
        return tokens

    def _shape(self, plan: Plan) -> tuple[int, int]:
        mine = sequences_of(plan.config, plan.axes.grid.coordinates(self.about().rank)["dp"])
        return len(mine), plan.config.data.sequence + 1

    def truths(self, name: str, plan: Plan) -> np.ndarray | None:
        """Return whether a document ends at each of these tokens, or whether it is scored.

        None if all are alike (joined documents, no mask), or the file is older.
        """
        if name not in self.names:
            return None
        shape = self._shape(plan)
        truths = self.read(name, math.prod(shape))
        if truths.dtype != bool or truths.shape != shape:
            raise self.damaged(f"{name} are not {list(shape)} truth values")
        return truths


class Replay:
    """Runs what a file tells. at: the instruction that the debugger stops at. Raises DataError."""

    def __init__(self, path: str, at: str | None):
        self._file = Recorded(path)
        self.about = about = self._file.about()
        self.plan = self._file.plan(about)
        self._tokens, self._ends = self._file.tokens(self.plan), self._file.truths("ends", self.plan)
        self._scored = self._file.truths("scored", self.plan)
        if about.device == "cuda" and not torch.cuda.is_available():
            what = f"{shown(path)}: recorded on a GPU, and there is none here"
            raise DataError(f"{what}; replay it where there is one")
        torch.set_num_threads(about.threads)
        axes, rank = self.plan.axes, about.rank
        self.place = Stops(rank, at)
        self.mesh = ReplayMesh(rank, axes.of(rank), axes.carried)
        self._given: list[tuple[str, int, str, str, int]] = []
        self.mesh.listen(self, self._fill, self.place)
        device = torch.device(about.device)
        self.actor = Actor(self.plan, self.mesh, device, place=self.place, compiled=about.compiled)
        if self.actor.compiled:
            compiler.require(None if about.device == "cpu" else "cuda")
        if at is not None and at not in map(str, self.actor.training):
            what = f"--stop-at {shown(at)}: rank {rank} has no such instruction"
            raise DataError(f"{what}; mpitrain program prints those that it has")
        self._restore()

    def run(self, say: Callable[[str], None]) -> int:
        """Run the step up to the update; say whether it is the recorded one, and return the exit code."""
        about = self.about
        gradients = list[Sequence]()
        device = self.actor.site.device
        tokens = torch.from_numpy(self._tokens).to(device)
        ends = about.separator if self._ends is None else torch.from_numpy(self._ends).to(device)
        scored = None if self._scored is None else torch.from_numpy(self._scored[:, 1:]).to(device)
        microbatches = self.actor.cutter.cut(tokens, ends, scored)

        def compute_and_look(compute: Callable[[], Work]) -> Work:
            work = compute()
            gradients.extend(list(pass_gradients) for pass_gradients in gradients_of(self.actor))
            say(f"loss {work.result.loss:.6f}, norm {work.result.grad_norm:.6f}")
            return work

        # what building has started isn't of the step
        self.mesh.listen(self, self._fill, self.place)
        self._given.clear()
        stop, save_progress = about.asked
        asked = StepRequests(lambda: stop, save_progress)
        self.actor.run_step(about.step, microbatches, about.lr, asked=asked, pass_runner=compute_and_look)
        return self._compare(gradients, say)

    def given(self, which: TappedOperation, parts: Sequence[Array]) -> None:
        """Note what this rank gives."""
        self._given.append((*which, digest(parts)))

    def came(self, which: TappedOperation, parts: Sequence[Array]) -> None:
        """Nothing comes but from the file."""

    def _fill(self, which: TappedOperation, buffers: Sequence[Array]) -> None:
        """Fill buffers with what came; before the step and after its update nothing is recorded."""
        names = [f"came/{which.axis}/{which.number}/{number}" for number in range(len(buffers))]
        if all(name in self._file.names for name in names):
            self._file.fill(names, buffers)

    def _restore(self) -> None:
        for number, x in enumerate(state_of(self.actor)):
            self._file.fill([f"state/{number}"], [x.detach().flatten()])
        self.actor.optimizer.set_step(self.about.updates)
        self.actor.loss_scale.state = self.about.loss_scale

    def _compare(self, gradients: list[Sequence], say: Callable[[str], None]) -> int:
        about = self.about
        given = {(axis, number): value for axis, number, *_, value in self._given}
        which = f"rank {about.rank} of {about.size}, step {about.step}"
        say(f"{which}: {len(about.given)} operations, {len(gradients)} gradients")
        for axis, number, operation, instruction, wanted in about.given:
            if given.get((axis, number)) != wanted:
                where = f"{shown(instruction)}, what it gives to {shown(operation)} {number} of {shown(axis)}"
                say(f"not the same bits: first in {where}")
                return FAILED
        if len(gradients) != len(about.gradients):
            say(f"not the same: {len(gradients)} gradients, {len(about.gradients)} recorded")
            return FAILED
        wrong = [name for (name, *_, a), (*_, b) in zip(about.gradients, gradients, strict=True) if a != b]
        if wrong:
            say(f"not the same bits: the gradient of {shown(wrong[0])}, and {len(wrong) - 1} more")
            return FAILED
        say("all sent messages and all gradients have the recorded bits")
        return DONE


def main(path: str, at: str | None, say: Callable[[str], None]) -> int:
    """Replay a file."""
    try:
        return Replay(path, at).run(say)
    except bdb.BdbQuit:
        say("left the debugger: nothing was compared")
        return FAILED

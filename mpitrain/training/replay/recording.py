"""A rank's part in one step, in an .npz file without pickle, written while the step runs.

about              JSON: the configuration, the rank, the step; what it gave to each operation
                   and its gradients, as digests
tokens             of its data-parallel rank
ends, scored       where documents end in these, if they are separate; which carry loss
state/0 ...        its weights, masters and moments before the step, in the order of state_of()
came/AXIS/7/0 ...  the buffers that operation 7 of an axis of several ranks has filled
"""

import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.actor.actor import Actor
from mpitrain.actor.step_work import Work
from mpitrain.comm.base.buffers import Array
from mpitrain.comm.tap import TappedOperation
from mpitrain.config import to_toml
from mpitrain.data.token_rows import TokenRows
from mpitrain.inputs import replacing
from mpitrain.training.checks.digests import as_bytes, digest

FORMAT = "mpitrain recording 1"


def state_of(actor: Actor) -> Iterator[torch.Tensor]:
    """Yield what a rank begins a step with, always in one order. Waits for weights that are on their way."""
    for stage in actor.stages.values():
        for bucket in stage.state.buckets:
            bucket.weights.wait()
            held = bucket.weights.whole, bucket.weights.shard, bucket.weights.master
            yield from (x for x in held if x is not None)
    for piece in actor.gradients.pieces:
        yield from (x for _, x in actor.optimizer.moments(piece))


def gradients_of(actor: Actor) -> list[tuple[str, int, int, int]]:
    """Return name, first and last element, and digest of each gradient that this rank has the sum of."""
    pieces = actor.gradients.pieces
    return [(piece.spec.name, piece.begin, piece.end, digest([piece.grad])) for piece in pieces]


class Recording:
    """Writes the part of this rank in one step. Given to Actor.run_step. A tap.

    facts: of the step, for `about`: JSON can hold them.
    failed: why there is no file, if there is none.
    """

    def __init__(self, path: Path, actor: Actor, rows: TokenRows, facts: dict[str, Any]):
        self._path = path
        self._actor = actor
        self._mesh = actor.mesh
        self._rows = rows
        self._facts = facts
        self.failed = ""
        self._given: list[tuple[str, int, str, str, int]] = []
        self._sizes = {name: axis.size for name, axis in actor.mesh.axes.items()}

    def __call__(self, compute: Callable[[], Work]) -> Work:
        with ExitStack() as self._opened:
            self._attempt(self._begin)
            self._mesh.listen(self)
            work = compute()
            self._mesh.listen(None)
            self._attempt(self._end, work)
        return work

    def _begin(self) -> None:
        draft = self._opened.enter_context(replacing(self._path))
        self._file = self._opened.enter_context(closing(zipfile.ZipFile(draft, "w", zipfile.ZIP_STORED)))
        for name in ("tokens", "ends", "scored"):
            if (array := getattr(self._rows, name)) is not None:
                self._write(name, array)
        for number, x in enumerate(state_of(self._actor)):
            self._write(f"state/{number}", as_bytes(x))

    def _end(self, work: Work) -> None:
        about = {
            "format": FORMAT,
            "config": to_toml(self._actor.config),
            "rank": self._mesh.rank,
            "size": self._mesh.size,
            "loss_scale": self._actor.loss_scale.state,
            "given": self._given,
            "gradients": gradients_of(self._actor),
            "loss": work.result.loss,
            "grad_norm": work.result.grad_norm,
            "asked": [work.asked.stop(), work.asked.save_progress],
            **self._facts,
        }
        self._write("about", np.frombuffer(json.dumps(about).encode(), np.uint8))
        self._opened.close()

    def _attempt(self, write: Callable[..., None], *arguments: Any) -> None:
        """Write, if all before could be written: others wait for this rank, not for its disk."""
        if self.failed:
            return
        try:
            write(*arguments)
        except OSError as error:
            self.failed = error.strerror or str(error)
            with suppress(OSError):  # closing what can't be written fails, too
                self._opened.__exit__(type(error), error, error.__traceback__)

    def given(self, which: TappedOperation, parts: Sequence[Array]) -> None:
        """Note the digest of what this rank gives."""
        self._given.append((*which, digest(parts)))

    def came(self, which: TappedOperation, parts: Sequence[Array]) -> None:
        """Write what came from others."""
        if self._sizes[which.axis] > 1:
            for number, x in enumerate(parts):
                self._attempt(self._write, f"came/{which.axis}/{which.number}/{number}", as_bytes(x))

    def _write(self, name: str, array: np.ndarray) -> None:
        with self._file.open(f"{name}.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)

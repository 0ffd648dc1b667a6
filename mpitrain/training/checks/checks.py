"""What is done to a step beside computing it: recorded, computed again, compared over replicas."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mpitrain.actor.actor import Actor, PassRunner, run_once
from mpitrain.actor.step_work import Work
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.status_board import BUSY
from mpitrain.comm.base.world import World
from mpitrain.data.token_rows import TokenRows
from mpitrain.inputs import as_argument
from mpitrain.training.checks.replicas import Corruption, different
from mpitrain.training.checks.rerun import RecomputeCheck
from mpitrain.training.replay.record_request import RecordRequest
from mpitrain.training.replay.recording import Recording


@dataclass
class Checks:
    """The checks of one rank. say: on rank 0.  record: a rank and a step, if one is to be recorded."""

    _actor: Actor
    _world: World
    _rundir: RunDir
    _say: Callable[[str], None]
    _record: RecordRequest | None
    _recompute: RecomputeCheck | None = None
    _has_recorded: bool = False

    def pass_runner(self, step: int, rows: Callable[[], TokenRows], facts: dict[str, Any]) -> PassRunner:
        """Return what runs the gradient pass: once, twice (rerun.py), or recorded (recording.py).

        rows, facts: for a recording.
        """
        self._recompute, period = None, self._actor.config.numerics.rerun_every
        if self._record and step == self._record.step:
            mine = self._world.rank == self._record.rank
            return partial(self._recorded, self._recording(rows(), {**facts, "step": step}) if mine else None)
        if period and step % period == 0:
            self._recompute = RecomputeCheck(self._actor, self._world)
        return self._recompute or run_once

    def _recording(self, rows: TokenRows, facts: dict[str, Any]) -> Recording:
        device = self._actor.site.device.type
        facts |= {"threads": torch.get_num_threads(), "device": device, "compiled": self._actor.compiled}
        return Recording(self._record.path_in(self._rundir.path), self._actor, rows, facts)

    def _recorded(self, recording: Recording | None, compute: Callable[[], Work]) -> Work:
        """Compute, on one rank while it is recorded, and say if it could not be. Collective."""
        work = (recording or run_once)(compute)
        failure = recording.failed if recording else ""
        failed = self._world.first_of("whether the step is recorded", failure)
        if failed:
            self._say(f"{as_argument(self._record.path_in(self._rundir.path))} can't be written: {failed}")
        self._has_recorded = not failed
        return work

    def corruption(self, step: int, saving: bool) -> Corruption:
        """Return what can't be relied on, alike on all ranks: then nothing is saved. Collective."""
        verdict = self._recompute.verdict if self._recompute else None
        if verdict and verdict.text:
            self._say(f"step {step}: {verdict.text}")
            if verdict.persistent:
                return Corruption(verdict.text, verdict.nodes)
        period = self._actor.config.numerics.check_every
        if not period or not (saving or step % period == 0):
            return Corruption()
        with self._actor.place.at("step", "comparing replicas", BUSY):
            return different(self._actor, self._world)

    def describe(self) -> str:
        """Say where a recording is, when a run is over."""
        if not self._has_recorded:
            return ""
        return f"  look closer     mpitrain replay {as_argument(self._record.path_in(self._rundir.path))}"

"""Weights & Biases: a run of one identity over all starts, offline where its service can't be reached."""

import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from mpitrain.inputs import read_regular, replacing
from mpitrain.report.loggers.catalog import LoggedRun

CONNECTED_S = 20.0  # in which its service has to answer
MOST_ID_BYTES = 64


class WandbLogger:
    """Offline, the folder wandb/offline-run-* holds the whole run for `wandb sync`.

    Online, steps that an earlier start has sent aren't sent again: they can't be taken back.
    WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY and WANDB_API_KEY hold as usual.
    """

    def __init__(self, run: LoggedRun):
        identity = _identity(run.folder / "id")
        for path in (run.folder / "wandb").glob(f"*run-*-{identity}"):
            if not path.is_symlink():
                shutil.rmtree(path)
        mode = os.environ.get("WANDB_MODE")
        try:
            self._run = _begun(run, identity, mode or "online")
        except wandb.errors.Error:
            if mode:
                raise
            self._run = _begun(run, identity, "offline")
        self._first = self._run.step  # 0, or after what its service has

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Log the numbers of a step."""
        if step >= self._first:
            self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Nothing: wandb's own process writes."""

    def end(self) -> None:
        """Finish, and leave no wandb of this process: another may begin."""
        self._run.finish()


def _begun(run: LoggedRun, identity: str, mode: str) -> Any:
    settings = wandb.Settings(
        silent=True, console="off", init_timeout=CONNECTED_S, x_disable_stats=True, save_code=False
    )
    project = os.environ.get("WANDB_PROJECT", "mpitrain")
    resume = "allow" if mode == "online" else None
    known = {"name": run.name, "dir": run.folder, "config": dict(run.config)}
    return wandb.init(project=project, id=identity, resume=resume, mode=mode, settings=settings, **known)


def _identity(path: Path) -> str:
    """Return the name that wandb has for the run; made at the first start."""
    with suppress(FileNotFoundError):
        text = read_regular(path, MOST_ID_BYTES).decode("ascii", "replace").strip()
        if text.isalnum():
            return text
    identity = uuid.uuid4().hex[:12]
    with replacing(path) as file:
        file.write(identity.encode())
    return identity

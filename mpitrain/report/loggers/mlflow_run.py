"""MLflow: one run in a SQLite file, for `mlflow ui --backend-store-uri sqlite:///.../mlflow.db`."""

import os
from collections.abc import Mapping
from typing import ClassVar

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.entities import Metric, Param, Run
from mlflow.tracking import MlflowClient

from mpitrain.report.loggers.catalog import LoggedRun

FILE = "mlflow.db"
EXPERIMENT = "mpitrain"
MOST_METRICS = 1000  # of a call
MOST_PARAMS = 100
MOST_CHARACTERS = 500  # of a parameter, in all versions


class MlflowLogger:
    """The run of an earlier start is resumed, or replaced if steps are repeated or keys are others."""

    # MLflow keeps a file open that it has opened once: then its runs are deleted, not the file
    _opened: ClassVar[bool] = False

    def __init__(self, run: LoggedRun):
        self._metrics: list[Metric] = []
        if not run.resumed and not self._opened:
            for old in run.folder.glob(f"{FILE}*"):
                old.unlink()
        self._client = _opened_client(run)
        runs = _runs(self._client)
        if run.resumed:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        for old in runs:
            self._client.delete_run(old.info.run_id)
        experiment = _experiment(self._client, run)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(key, value) for key, value in _params(run).items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MOST_PARAMS])

    @classmethod
    def resumes(cls, run: LoggedRun) -> bool:
        """Return whether an earlier start has left a run with these keys: they can't be changed."""
        if not (run.folder / FILE).exists():
            return False
        runs = _runs(_opened_client(run))
        return bool(runs) and runs[0].data.params == _params(run)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Keep the numbers of a step until there are enough for a call."""
        if len(self._metrics) + len(values) > MOST_METRICS:
            self.flush()
        self._metrics += [Metric(name, value, int(time * 1000), step) for name, value in values.items()]

    def flush(self) -> None:
        """Write what was kept."""
        for first in range(0, len(self._metrics), MOST_METRICS):
            self._client.log_batch(self._id, metrics=self._metrics[first : first + MOST_METRICS])
        self._metrics = []

    def end(self) -> None:
        """Mark the run as over."""
        self.flush()
        self._client.set_terminated(self._id)


def _opened_client(run: LoggedRun) -> MlflowClient:
    MlflowLogger._opened = True
    return MlflowClient(f"sqlite:///{(run.folder / FILE).absolute()}")


def _experiment(client: MlflowClient, run: LoggedRun) -> str:
    known = client.get_experiment_by_name(EXPERIMENT)
    artifacts = (run.folder / "artifacts").absolute().as_uri()
    return known.experiment_id if known else client.create_experiment(EXPERIMENT, artifacts)


def _runs(client: MlflowClient) -> list[Run]:
    """Return the runs of the file that aren't deleted, the newest first."""
    known = client.get_experiment_by_name(EXPERIMENT)
    return list(client.search_runs([known.experiment_id])) if known else []


def _params(run: LoggedRun) -> dict[str, str]:
    return {key: str(value)[:MOST_CHARACTERS] for key, value in run.config.items()}

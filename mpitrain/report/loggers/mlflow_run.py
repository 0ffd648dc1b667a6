"""MLflow: one run in a SQLite file, for `mlflow ui --backend-store-uri sqlite:///.../mlflow.db`."""

import os
from collections.abc import Mapping

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from mpitrain.report.loggers.catalog import LoggedRun

MOST_METRICS = 1000  # of a call
MOST_PARAMS = 100
MOST_CHARACTERS = 500  # of a parameter, in all versions


class MlflowLogger:
    """The file of an earlier start, whose steps this one has too, is replaced."""

    def __init__(self, run: LoggedRun):
        path = run.folder / "mlflow.db"
        for old in run.folder.glob("mlflow.db*"):
            old.unlink()
        self._client = MlflowClient(f"sqlite:///{path.absolute()}")
        artifacts = (run.folder / "artifacts").absolute().as_uri()
        experiment = self._client.create_experiment("mpitrain", artifact_location=artifacts)
        self._id = self._client.create_run(experiment, run_name=run.name).info.run_id
        self._metrics: list[Metric] = []
        params = [Param(key, str(value)[:MOST_CHARACTERS]) for key, value in run.config.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MOST_PARAMS])

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

"""Which loggers `run.loggers` can name, and what a logger is."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpitrain.errors import ConfigError, suggestion
from mpitrain.inputs import shown
from mpitrain.plugins import is_plugin
from mpitrain.plugins import load as load_plugin

KEY = "run.loggers"


class LoggedRun(NamedTuple):
    """What a logger knows of the run."""

    name: str
    folder: Path  # the logger's own, there already
    config: Mapping[str, Any]  # all keys, as {"run.steps": 120, ...}
    resumed: bool = False  # what an earlier start has logged stays, and isn't given again


class Logger(Protocol):
    """What `module:name` in run.loggers names: a class with these methods, made for each start.

    It gets all lines of metrics.jsonl from the first one, those of earlier starts too. After a
    rollback it is ended, and another one is made. Whatever it raises ends the logger, not the run.
    A class method `resumes(run)`, if there is one, says whether the folder still holds what an
    earlier start has logged. Then a start that repeats no step makes it with `run.resumed`: it gets
    new lines alone.
    """

    def __init__(self, run: LoggedRun) -> None: ...

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Take the numbers of a step. time: when it was over, in seconds since 1970."""

    def flush(self) -> None:
        """Make visible what was logged; called about once a second.

        With `resumes` it must be on the disk then: it isn't given again.
        """

    def end(self) -> None:
        """Close what is open."""


METHODS = ("log", "flush", "end")


BUILT_IN = {  # each with its class, and the package that it needs
    "tensorboard": ("tensorboard_events:TensorBoardLogger", "tensorboard"),
    "csv": ("csv_files:CsvLogger", ""),
    "wandb": ("wandb_run:WandbLogger", "wandb"),
    "mlflow": ("mlflow_run:MlflowLogger", "mlflow"),
}


def require_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError for a logger that isn't known, or not installed. Imports none of them."""
    for number, name in enumerate(names):
        _require(name)
        if name in names[:number]:
            raise ConfigError(f"{KEY}: {shown(repr(name))} is given twice; give it once")


def _require(name: str) -> None:
    package, install = name.partition(":")[0].partition(".")[0], "set PYTHONPATH to its folder"
    if not is_plugin(name):
        if name not in BUILT_IN:
            known = f"known: {', '.join(BUILT_IN)}, and module:name for a class of your own"
            a_list = 'write a list: run.loggers = ["tensorboard", "csv"]'
            instead = a_list if "," in name else suggestion(name, BUILT_IN, known)
            raise ConfigError(f"{KEY}: found {shown(repr(name))}; {instead}")
        _, package = BUILT_IN[name]
        install = f"pip install {package}"
    if package and not _is_there(package):
        raise ConfigError(
            f'{KEY}: "{name}" needs the package {package}, which is not installed on the node of rank 0; '
            f"{install}, or leave it out"
        )


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):  # of a module that has no specification
        return False


def load_logger(name: str) -> type[Logger]:
    """Import a logger's class. Raises ConfigError."""
    place = f"mpitrain.report.loggers.{BUILT_IN[name][0]}" if name in BUILT_IN else name
    logger = load_plugin(KEY, place, type, f"a class with the methods {', '.join(METHODS)}")
    if missing := [method for method in METHODS if not callable(getattr(logger, method, None))]:
        raise ConfigError(f'{KEY} = "{shown(name)}": it has no method {missing[0]}; add it')
    return logger

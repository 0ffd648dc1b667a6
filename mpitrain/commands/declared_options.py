"""Options of a command are the fields of its request: name, type, default and words stand there alone.

    @dataclass(frozen=True, kw_only=True)
    class SweepRequest:
        steps: int = option("Timed steps of each layout.", default=5, type=COUNT)

is the option `--steps` of the command below `@options_of(SweepRequest)`, which is called with a
SweepRequest. What a field says besides its words are click's own settings of an option.
"""

import math
import re
from collections.abc import Callable
from dataclasses import field, fields
from functools import wraps
from typing import Any

import click

from mpitrain.errors import ConfigError
from mpitrain.inputs import shown

MOST_RANKS = 1_000_000  # as in layout.py, which isn't imported for --help
INTEGERS = 2**31 - 1  # larger ones mean nothing here


class Name(click.Path):
    """A path. An empty one is refused: in a script it is a variable that isn't set, and not what is
    meant by leaving it out.
    """

    def convert(self, value: str, param: click.Parameter, ctx: click.Context) -> str:
        if value == "":
            argument = param.metavar or param.name.upper()
            what = param.opts[0] if isinstance(param, click.Option) else argument
            raise ConfigError(f"{what} is empty; give one{', or leave it out' * (not param.required)}")
        return super().convert(value, param, ctx)


class Finite(click.FloatRange):
    """A number that is neither nan, which is in every range, nor inf."""

    def convert(self, value: str, param: click.Parameter, ctx: click.Context) -> float:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            raise ConfigError(f"{param.opts[0]} {number}: give a finite number")
        return number


class StepOrBest(click.ParamType):
    """A number, "best", or "best:METRIC"."""

    name = "step"

    def convert(self, value: str, param: click.Parameter, ctx: click.Context) -> int | str:
        if isinstance(value, str) and re.fullmatch("best(:.+)?", value):
            return value
        if isinstance(value, str) and not value.isdecimal():
            self.fail(f"'{shown(value)}'; needed a step's number, best, or best:METRIC", param, ctx)
        return click.IntRange(0).convert(value, param, ctx)


COUNT = click.IntRange(1, INTEGERS)
RANKS = click.IntRange(1, MOST_RANKS)
NAME = Name()


def option(words: str, *names: str, **settings: Any) -> Any:
    """Declare a field as an option. names: as typed, if not that of the field."""
    absent = () if settings.get("multiple") else False if settings.get("is_flag") else None
    declared = {"names": names, "settings": {"help": words, **settings}}
    return field(default=settings.get("default", absent), metadata=declared)


def argument(**settings: Any) -> Any:
    """Declare a field as an argument."""
    return field(default=None, metadata={"settings": settings})


def config_argument() -> Any:
    """Declare the argument CONFIG."""
    return argument(required=False, type=NAME)


def overrides_option() -> Any:
    """Declare the option --set."""
    words = "Override one key, for example --set parallel.pp=2."
    return option(words, "--set", multiple=True, metavar="KEY=VALUE")


def _typed(declared: Any) -> tuple[str, ...]:
    """Return the names by which a field is typed; none of an argument."""
    names = declared.metadata.get("names")
    return names if names or names is None else (f"--{declared.name.replace('_', '-')}",)


def options_of(request: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a click command the options that the fields of a request declare, in their order."""

    def with_options(command: Callable[..., int]) -> Callable[..., int]:
        @wraps(command)
        def start(**values: Any) -> int:
            return command(request=request(**values))

        for each in reversed(fields(request)):
            settings = each.metadata["settings"]
            if (names := _typed(each)) is None:
                start = click.argument(each.name, **settings)(start)
            else:
                start = click.option(*names, each.name, **settings)(start)
        return start

    return with_options


def options_given(request: Any) -> dict[str, Any]:
    """Return the options of a request that were typed, by their names, such as --node-hours."""
    values = {names[0]: getattr(request, each.name) for each in fields(request) if (names := _typed(each))}
    return {name: value for name, value in values.items() if value not in (None, False, ())}

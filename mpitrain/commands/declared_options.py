"""Options of a command are the fields of its request: name, type, default and words stand there alone.

    @dataclass(frozen=True, kw_only=True)
    class SweepRequest:
        steps: int = option("Timed steps of each layout.", default=5, type=COUNT)

is the option `--steps` of the command below `@options_of(SweepRequest)`, which is called with a
SweepRequest. What a field says besides its words are click's own settings of an option.
"""

import math
import re
from collections.abc import Callable, Collection
from dataclasses import field, fields
from functools import wraps
from typing import Any, TypeVar

import click

from mpitrain.errors import ConfigError
from mpitrain.inputs import shown

MOST_RANKS = 1_000_000  # more than any machine has; what is asked of each is then answered in seconds
INTEGERS = 2**31 - 1  # larger ones mean nothing here
T = TypeVar("T")


class GivenText(click.ParamType):
    """A text. An empty one is refused: in a script it is a variable that isn't set, and not what is
    meant by leaving it out.
    """

    name = "text"

    def convert(self, value: str, param: click.Parameter, ctx: click.Context) -> str:
        if value == "":
            argument = (param.metavar or param.name.upper()).strip("[]")
            what = param.opts[0] if isinstance(param, click.Option) else argument
            raise ConfigError(f"{what} is empty; give one{', or leave it out' * (not param.required)}")
        return value


class Name(click.Path):
    """A path, which isn't empty."""

    def convert(self, value: str, param: click.Parameter, ctx: click.Context) -> str:
        return super().convert(TEXT.convert(value, param, ctx), param, ctx)


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
TEXT = GivenText()
NAME = Name()


def option(words: str, *names: str, **settings: Any) -> Any:
    """Declare a field as an option. names: as typed, if not that of the field."""
    if not settings.keys() & {"type", "default", "multiple", "is_flag"}:
        settings["type"] = TEXT
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


def _typed(name: str, declared: Any) -> tuple[str, ...]:
    return declared.metadata["names"] or (f"--{name.replace('_', '-')}",)


def options_of(request: type) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a click command the options that the fields of a request declare, in their order."""

    def with_options(command: Callable[..., int]) -> Callable[..., int]:
        @wraps(command)
        def start(**values: Any) -> int:
            return command(request=request(**values))

        for each in reversed(fields(request)):
            start = option_named(each.name, each)(start)
        return start

    return with_options


def option_named(name: str, declared: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return the decorator of click that gives a command a declared option, or argument, as `name`."""
    settings = declared.metadata["settings"]
    if "names" not in declared.metadata:
        return click.argument(name, **settings)
    return click.option(*_typed(name, declared), name, **settings)


def refuse_options(request: Any, names: Collection[str], why: str) -> None:
    """Raise ConfigError for the first of some options that was typed. why: "does nothing with ..."."""
    if name := next((name for name in options_given(request) if name in names), None):
        raise ConfigError(f"{name} {why}")


def options_given(request: Any) -> dict[str, Any]:
    """Return the options of a request that aren't their defaults, by their names, such as --node-hours."""
    options = [each for each in fields(request) if "names" in each.metadata]
    given = [each for each in options if getattr(request, each.name) != each.default]
    return {_typed(each.name, each)[0]: getattr(request, each.name) for each in given}

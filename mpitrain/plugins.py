"""Plug-ins: code of the user's own, which a configuration names as `module:name`.

    model.family = "my_models:GEMMA"        the object GEMMA of my_models.py, on Python's path (PYTHONPATH)
    optimizer.name = "my_optimizers:LION"   likewise; so do data.source and pipeline.schedule
    run.loggers = ["my_loggers:Mine"]       a class, which a process beside the run imports

To load a module is to run it. So only a name that the user typed in this command is loaded: in a
configuration file of his own, in --set, or in the variable MPITRAIN_PLUGINS. The config.toml of a
run directory is often a stranger's: a name that stands only there is refused (config.parse).
"""

import importlib
import os
import pkgutil
import re
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from mpitrain import config_hints
from mpitrain.errors import ConfigError, suggestion
from mpitrain.inputs import read_file, shown

T = TypeVar("T")
OF_COMPUTATION = ("model.family", "optimizer.name", "data.source", "pipeline.schedule")
KEYS = (*OF_COMPUTATION, "run.loggers")
VARIABLE = "MPITRAIN_PLUGINS"  # names that may be loaded wherever they are, with commas or spaces
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
MOST_SHOWN = 8  # names in a message
MOST_SOURCE = 1 << 24  # bytes of a module


def is_plugin(name: object) -> bool:
    """Return whether the value of a key names an object of a module: `module:name`."""
    return isinstance(name, str) and NAME.fullmatch(name) is not None


def names_in(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (key, name) of each plug-in in a tree of tables, {"model": {"family": ...}}."""
    for key in KEYS:
        table, _, name = key.partition(".")
        keys = tree.get(table)
        value = keys.get(name) if isinstance(keys, Mapping) else None
        for item in value if isinstance(value, list | tuple) else (value,):
            if is_plugin(item):
                yield key, item


def refuse_untyped(tree: Mapping[str, Any], typed: Collection[str]) -> None:
    """Raise ConfigError for a plug-in that the user didn't name in this command. Loads nothing.

    typed: the names in files of the user's own and in --set.
    """
    allowed = {*typed, *re.split(r"[,\s]+", os.environ.get(VARIABLE, ""))}
    not_allowed = [(key, name) for key, name in names_in(tree) if name not in allowed]
    if not_allowed:
        settings = " and ".join(f'{key} = "{shown(name)}"' for key, name in not_allowed)
        raise ConfigError(
            f"found {settings} in a run directory: it names code, which would be run; if you trust it, set "
            f"the variable in front of the command: {allowing(name for _, name in not_allowed)}"
        )


def allowing(names: Iterable[str]) -> str:
    """Return the setting of the variable that allows some plug-ins, as a word for a shell."""
    return f"{VARIABLE}={','.join(dict.fromkeys(names))}"


def load(key: str, name: str, kind: type[T], needed: str) -> T:
    """Import the module of `module:name` and return the object, an instance of `kind`.

    needed: what the key needs, in words.  Raises ConfigError for what isn't there, or is another.
    Runs the module: whoever read the name has refused what the user didn't type.
    """
    module_name, _, attribute = name.partition(":")
    module = _imported(key, name, module_name)
    plugin = getattr(module, attribute, None)
    if isinstance(plugin, kind):
        return plugin
    found = type(plugin).__name__
    article = "an" if found[:1].lower() in "aeiou" else "a"
    what = "nothing of this name" if plugin is None else f"{article} {found}"
    fitting = [fitting_name for fitting_name, value in vars(module).items() if isinstance(value, kind)]
    instead = ", ".join(f"{module_name}:{fitting_name}" for fitting_name in fitting[:MOST_SHOWN])
    file = getattr(module, "__file__", None) or module_name
    change = f"use {instead}" if instead else f"define it in {shown(file)}"
    raise ConfigError(f'{key} = "{shown(name)}": found {what}, needed {needed}; {change}')


@dataclass(frozen=True)
class Catalog(Generic[T]):
    """What a key can name: objects of a package's modules, each by its `name`, and plug-ins.

    A file in the package is all that a new one takes: it is found there, by its kind.
    package: its modules are imported when one of them is asked for.
    needed: what a plug-in must be, in words.
    """

    key: str
    package: str
    kind: type[T]
    needed: str

    def built_in(self) -> Mapping[str, T]:
        """Return those of the package by their names."""
        return _objects(self.package, self.kind)

    def find(self, name: str) -> T:
        """Return what a value of the key names. Raises ConfigError if there is none."""
        known = self.built_in()
        if name in known:
            return known[name]
        if is_plugin(name):
            return load(self.key, name, self.kind, self.needed)
        instead = config_hints.instead_of_value(self.key, name)
        known_names = f"known: {', '.join(known)}"
        hint = f"{instead}; {known_names}" if instead else suggestion(name, known, known_names)
        raise ConfigError(f"{self.key} = {shown(repr(name))}; {hint}")


@cache
def _objects(package: str, kind: type[T]) -> dict[str, T]:
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    names = sorted(module.name for module in modules)
    spaces = [vars(importlib.import_module(f"{package}.{name}")) for name in names]
    objects = [value for space in spaces for value in space.values() if isinstance(value, kind)]
    return {value.name: value for value in objects}


def sources(tree: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the source (b"": none) of each module of the computation that a tree names."""
    names = [name.partition(":")[0] for key, name in names_in(tree) if key in OF_COMPUTATION]
    return {module.__name__: _source(module) for module in map(importlib.import_module, names)}


def _source(module: ModuleType) -> bytes:
    try:
        return read_file(getattr(module, "__file__", None) or "", MOST_SOURCE)
    except OSError:  # of an archive, or made by a program
        return b""


def _imported(key: str, name: str, module_name: str) -> ModuleType:
    """Return a module. Raises ConfigError if there is none, or for whatever it raises itself."""
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise _failed(key, name, module_name, error) from error
        is_here = Path(f"{module_name.partition('.')[0]}.py").is_file()
        here = "it is in this folder: set PYTHONPATH=." if is_here else "set PYTHONPATH to its folder"
        raise ConfigError(
            f'{key} = "{shown(name)}": found no module {shown(missing)}, needed one on Python\'s path, on '
            f"every node; {here}"
        ) from None
    except (Exception, SystemExit) as error:
        raise _failed(key, name, module_name, error) from error


def _failed(key: str, name: str, module_name: str, error: BaseException) -> ConfigError:
    """Return what to raise for an error in a module of the user's, with the last place in it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    outside = [frame for frame in own if not frame.filename.startswith("<frozen ")]
    where = f" at {outside[-1].filename}:{outside[-1].lineno}" if outside else ""
    what = f"{module_name} raises {type(error).__name__}{where}: {shown(str(error) or 'no message')}"
    return ConfigError(f'{key} = "{shown(name)}": {what}; fix the module')

"""What a plan knows of an optimiser: its keys, its moments, and whether it needs whole matrices.

Each declares that in one object, in a file of optim/optimizers/ or in a module of the user's own
(plugins.py). Nobody else knows optimisers by name, and there is no default.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from mpitrain.config import OptimizerTable
from mpitrain.errors import ConfigError
from mpitrain.plan.declared.work import PartWork
from mpitrain.plugins import Catalog

GROUPS = ("matrix", "table", "vector")  # of parameters that are trained: Spec.group
MOST_NARROW = 2  # moments of a number that 32 random bits can round to 16 (optim/moments.py)
# keys that are open in the table: each optimiser has some of them
OPEN = tuple(key for key, value in msgspec.structs.asdict(OptimizerTable()).items() if value is None)


@dataclass(frozen=True)
class OptimizerKind:
    """An optimiser. What computes it is imported when it is built: no torch.

    name: value of optimizer.name, of one in optim/optimizers/.
    keys: its keys of the table `optimizer`, and their values where none is given.
    moments: names in a checkpoint of what it keeps of each number of a parameter, by the table
    `optimizer` and the group of the parameter (Spec.group).
    build: makes it of OptimizerParts (optim/protocol.py): an Optimizer.
    whole_matrices: it looks at whole matrices between layers, which ranks put together for it
    (optim/matrices.py); else at each number by itself.
    work: of an update on a whole matrix, by the table and its rows and columns.
    own_passes: numbers that are read or written for each one of a parameter that a rank has, by the
    table and the group; default: gradient, weight and moments, in one pass.
    """

    name: str
    keys: Mapping[str, Any]
    moments: Callable[[OptimizerTable, str], tuple[str, ...]]
    build: Callable[[Any], Any]
    whole_matrices: bool = False
    work: Callable[[OptimizerTable, int, int], PartWork] = lambda settings, rows, columns: PartWork()
    own_passes: Callable[[OptimizerTable, str], float] | None = None

    def passes(self, settings: OptimizerTable, group: str) -> float:
        """Return how many numbers an update reads or writes for each one that a rank has."""
        if self.own_passes is not None:
            return self.own_passes(settings, group)
        return 3 + 2 * len(self.moments(settings, group))

    def resolve(self, settings: OptimizerTable) -> OptimizerTable:
        """Fill in the keys that it has. Raises ConfigError for one that it would ignore."""
        given = {key: getattr(settings, key) for key in OPEN if getattr(settings, key) is not None}
        for key, value in given.items():
            if key not in self.keys:
                having = f"which has {', '.join(self.keys) or 'no keys'}"
                raise ConfigError(
                    f"optimizer.{key} = {json.dumps(value)} does nothing with {_named(settings)}, {having}; "
                    "leave it out"
                )
        ahead = {"nesterov": False} if given.get("momentum") == 0 and "nesterov" in self.keys else {}
        if ahead and given.get("nesterov"):
            raise ConfigError(
                "optimizer.nesterov = true with optimizer.momentum = 0 looks ahead along nothing; "
                "leave one of them out"
            )
        resolved = msgspec.structs.replace(settings, **{**self.keys, **given, **ahead})
        if resolved.moments == "bf16":
            self._refuse_narrow(resolved)
        return resolved

    def _refuse_narrow(self, settings: OptimizerTable) -> None:
        most = max(len(self.moments(settings, group)) for group in GROUPS)
        if not most:
            why = "optimizer.momentum = 0" if settings.momentum == 0 else _named(settings)
            raise ConfigError(
                f'optimizer.moments = "bf16" does nothing with {why}: {self.name} keeps none; leave one of '
                "them out"
            )
        if most > MOST_NARROW:
            raise ConfigError(
                f'optimizer.moments = "bf16" with {_named(settings)}, which keeps {most} moments; random '
                f"bits are drawn for {MOST_NARROW}: leave optimizer.moments out"
            )


def _named(settings: OptimizerTable) -> str:
    return f"optimizer.name = {json.dumps(settings.name)}"


OPTIMIZERS = Catalog(
    "optimizer.name",
    "mpitrain.optim.optimizers",
    OptimizerKind,
    "an OptimizerKind (mpitrain/plan/declared/optimizers.py)",
)


def optimizer_kind(settings: OptimizerTable) -> OptimizerKind:
    """Return the optimiser that a configuration names. Raises ConfigError if there is none."""
    return OPTIMIZERS.find(settings.name)


def num_moments(settings: OptimizerTable, group: str) -> int:
    """Return how many numbers an optimiser keeps of one number of a parameter of a group (Spec.group)."""
    return len(optimizer_kind(settings).moments(settings, group)) if group in GROUPS else 0

"""A machine with other figures."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mpitrain.plan.predict.step_time.machine import MachineRates

# figures that --what-if changes, and the fields of a machine's rates that they are
CHANGED: Mapping[str, tuple[str, ...]] = {
    "links.inside": ("inside", "pair"),
    "links.between": ("between",),
    "memory.bandwidth": ("memory_bandwidth", "memory_passes"),
    "memory_bytes": ("memory_bytes",),
    "attention": ("attention_forward", "attention_backward"),
    "launch_s": ("launch_s",),
    "ranks_per_node": ("ranks_per_node",),
    "products": ("products",),
}


class WhatIf(NamedTuple):
    """A figure of the machine that is another. figure: a key of CHANGED. factor: of it."""

    figure: str
    factor: float

    def on(self, rates: MachineRates) -> MachineRates:
        """Return a machine with the figure changed."""
        changed: dict[str, Any] = {}
        for field in CHANGED[self.figure]:
            before = getattr(rates, field)
            if isinstance(before, Mapping):
                changed[field] = {name: self.factor * rate for name, rate in before.items()}
            elif isinstance(before, int):
                changed[field] = max(1, round(self.factor * before))
            else:
                changed[field] = self.factor * before
        return rates._replace(**changed)

    def describe(self) -> str:
        return f"{self.figure} x {self.factor:g}"

"""The file of a machine with constants fitted to rows of it."""

from collections.abc import Sequence

import msgspec
import tomli_w

from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import shown
from mpitrain.planner.fitted import NOTHING, Sample, calibrated, fit, quantile
from mpitrain.planner.published_rows import Row

MODELS = 2  # whose steps each tell how far off the others' constants are
LEAST_WIDE = 0.03  # of an interval, each way: steps of one machine differ by as much


def machine_text(rows: Sequence[Row], samples: Sequence[Sample], source: str) -> str:
    """Return the TOML of the machine of some rows, with constants fitted to them.

    Raises ConfigError for rows of several machines or frameworks, or of none with a time.
    """
    systems = sorted({row.whole_system for row in rows})
    if len(systems) != 1:
        found = ", ".join(systems[:4]) or "no row with a time"
        raise ConfigError(f"--out of a machine's file: found {shown(found)}; needed rows of one system")
    first = rows[0]
    constants = fit(samples, NOTHING, first.regime)
    words = f"to {counted(len(rows), 'steps')} of {source}"
    machine = calibrated(first.machine, constants, first.convention.kernel, words)
    spread = _left(samples, first.regime)
    return tomli_w.dumps(msgspec.to_builtins(msgspec.structs.replace(machine, spread=spread)))


def _left(samples: Sequence[Sample], regime: str) -> list[float]:
    """Return quantiles of what steps took over predictions by the other models' steps."""
    models = sorted({sample.model for sample in samples})
    if len(models) < MODELS:
        return []
    ratios = []
    for model in models:
        constants = fit([each for each in samples if each.model != model], NOTHING, regime)
        ratios += [each.measured / each.at(constants) for each in samples if each.model == model]
    middle = quantile(ratios, 0.5)
    low = min(quantile(ratios, 0.1), middle * (1 - LEAST_WIDE))
    high = max(quantile(ratios, 0.9), middle * (1 + LEAST_WIDE))
    return [float(f"{value:.3g}") for value in (low, middle, high)]

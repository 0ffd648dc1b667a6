"""How much the tests do, by one variable: MPITRAIN_EFFORT.

not set    few cases of each kind, which each change needs
long       what takes seconds and has a shorter test of its kind, and every case of a test
all        every layout and size too, on every number of ranks, and every random case
200        so many random cases; for a file that has some, which is named
50:100     random cases 50 to 99
"""

import os
import re

ASKED = os.environ.get("MPITRAIN_EFFORT", "")
if not re.fullmatch(r"|long|all|\d+|\d*:\d+", ASKED):
    raise ValueError(f"MPITRAIN_EFFORT: found {ASKED!r}; needed long, all, a number, or two as in 50:100")
OLDER = ("LONG", "LAYOUTS", "SIZES", "FUZZ", "KILLS", "STOPS", "ENDS", "PAIRS", "DAMAGE", "SEEDS")
for name in (f"MPITRAIN_{word}" for word in OLDER):
    if name in os.environ:
        raise ValueError(f"{name}: is no longer read; needed MPITRAIN_EFFORT=long, all or a number instead")
EVERY = ASKED == "all"
WITH_LONG = ASKED in ("long", "all")


def numbers(few: range, every: int) -> range:
    """Return which random cases to try: `few`, the first `every`, or those that are asked for."""
    if EVERY or ASKED in ("", "long"):
        return range(every) if EVERY else few
    first, _, last = ASKED.rpartition(":")
    return range(int(first or 0), int(last))


def cases(few: int, every: int) -> int:
    """Return how many random cases to try, `every` at most."""
    return min(numbers(range(few), every).stop, every)

"""The schedules whose tables are made at once; those that are searched for take seconds."""

from mpitrain.schedules import catalog

SEARCHED = ("plain-auto", "interleaved-auto", "v-auto")
NAMES = tuple(name for name in catalog.NAMES if name not in SEARCHED)

"""The change that `mpitrain memory` calls the cheapest that fits: given as it is said, it fits.

Whatever is cheaper doesn't.
"""

import re

import pytest
from conftest import LONG

from mpitrain import config as settings
from mpitrain.commands.inspect import show_memory
from mpitrain.errors import ConfigError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.predict import memory_limit
from mpitrain.plan.predict.cheapest_change import changes
from mpitrain.plan.predict.memory_limit import held_by_ranks, limit_of_node
from mpitrain.plan.settings.resolve import resolve

MODEL = (
    *("model.layers=8", "model.width=512", "model.heads=8", "model.kv_heads=4", "model.ffn=1024"),
    *("model.vocab=8192", "data.sequence=512", "batch.micro=1", "batch.global=16", "run.layout=default"),
)
QUOTED = "memory.recompute", "parallel.gather"
LAYOUTS = [
    (2, "parallel.dp=2 parallel.zero=0"),
    (2, "parallel.pp=2"),  # ranks hold more and less, and share a node's memory
    pytest.param(4, "parallel.dp=2 parallel.pp=2 pipeline.schedule=v-half parallel.zero=0", marks=LONG),
    pytest.param(4, "parallel.dp=2 parallel.tp=2 parallel.regather=true", marks=LONG),
    pytest.param(4, "parallel.dp=4 parallel.zero=3 parallel.gather=step parallel.ahead=2", marks=LONG),
    (2, "parallel.dp=2 parallel.zero=2 parallel.reduce=step batch.global=2"),
    pytest.param(2, "parallel.dp=2 parallel.zero=1 memory.recompute=every-k memory.every=8", marks=LONG),
]


def of_node(monkeypatch, num_bytes: int) -> None:
    """Have this node seem to have so much memory."""
    sizes = {"SC_PHYS_PAGES": num_bytes, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(memory_limit.os, "sysconf", sizes.__getitem__)


def needed(given: tuple[str, ...], ranks: int) -> int:
    """Return the bytes that the ranks of a node need."""
    plan = plan_of(resolve(settings.load(None, given), ranks, 256))
    return limit_of_node(ranks).needed(held_by_ranks(plan, on_gpu=False))


def said_as(keys: tuple[str, ...]) -> str:
    pairs = (each.split("=") for each in keys)
    return " and ".join(f'{key} = "{value}"' if key in QUOTED else f"{key} = {value}" for key, value in pairs)


def overrides(keys: dict[str, object]) -> tuple[str, ...]:
    return tuple(f"{key}={str(value).lower()}" for key, value in keys.items())


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=str)
def test_the_cheapest_change_fits_and_nothing_cheaper_does(ranks, layout, monkeypatch):
    given = *MODEL, *layout.split()
    config = settings.load(None, given)
    every = []
    for keys in changes(plan_of(resolve(config, ranks, 256)), config):
        try:
            every.append((overrides(keys), needed((*given, *overrides(keys)), ranks)))
        except ConfigError:  # a pair of settings that don't go together
            continue
    mine, least = needed(given, ranks), min(number for _, number in every)
    assert least < mine
    for limit in (mine - 1, least, least - 1):
        of_node(monkeypatch, limit)
        said = re.findall(r"the cheapest change that fits: (.*)", show_memory(None, given, ranks))
        fitting = [keys for keys, number in every if number <= limit]
        assert [said_as(keys) for keys in fitting[:1]] == said
        assert bool(fitting) == (limit >= least)


def test_a_change_takes_with_it_what_would_be_refused():
    """Each of one setting is taken by a layout that has every key of a higher stage and of regather."""
    given = (
        *MODEL,
        *("parallel.dp=4", "parallel.tp=2", "parallel.zero=3", "parallel.gather=step", "parallel.ahead=2"),
        *("parallel.dp_shard=2", "parallel.regather=true", "memory.recompute=selective"),
    )
    config = settings.load(None, given)
    singles = [keys for keys in changes(plan_of(resolve(config, 8, 256)), config)][:6]
    assert {
        "parallel.zero": 0,
        "parallel.dp_shard": 0,
        "parallel.gather": "auto",
        "parallel.ahead": 1,
    } in singles
    assert {"memory.recompute": "full", "parallel.regather": False} in singles
    for keys in singles:
        if keys.get("memory.recompute") != "every-k":  # which ZeRO-3 doesn't take
            assert resolve(settings.load(None, (*given, *overrides(keys))), 8, 256)

"""A machine's file, measured: every rank measures at the same time, as ranks of a run compute.

A figure is the median over ranks and repeats of the rounds that agree with the best one, and its
spread the distance of the quartiles, as a share of it. What was disturbed is said in the file. What
can't be measured, a link that no two ranks have or a data sheet's peak, is that of a machine like it.
"""

import os
import statistics
import time
from collections.abc import Mapping
from itertools import chain
from typing import NamedTuple

import msgspec

from mpitrain.cluster.status_board import RankStatus
from mpitrain.comm.base import library
from mpitrain.comm.base.world import World
from mpitrain.config import Config
from mpitrain.errors import ConfigError, counted
from mpitrain.measuring import device, node_links, storage
from mpitrain.measuring.device import Samples
from mpitrain.measuring.measured_rounds import doubts_of, measured_in_rounds
from mpitrain.plan.predict.step_time.machine import (
    LINKS,
    Figure,
    LinkTable,
    MachineFile,
    find_machine,
    known,
    like_gpu,
)
from mpitrain.training.machine.device_placement import (
    FP8_CAPABILITY,
    DevicePlacement,
    looked_for,
    take_turns,
    way_of_messages,
)
from mpitrain.training.machine.gpus import Gpu

MOST_SPREAD = 0.3
DTYPES = {"cuda": ("bf16", "fp8", "fp32"), "cpu": ("fp32", "bf16", "fp64")}


class MeasuredFigure(NamedTuple):
    """A figure. spread: a share of its median."""

    median: float
    spread: float


class MeasuredMachine(NamedTuple):
    """made: as its file will say it. base: the machine whose figures stand where none were measured."""

    made: MachineFile
    base: MachineFile
    figures: dict[str, MeasuredFigure]


def measured_machine(
    world: World, place: RankStatus, config: Config, like: str | None, folder: str | None
) -> MeasuredMachine:
    """Measure the machine that these ranks are on. Collective.

    like: the machine whose figures stand where none can be measured. folder: for checkpoints, where
    writing is measured; None: it isn't. Raises ConfigError.
    """
    found = world.on_every_rank("looking for a device", lambda: looked_for(config))
    placement = take_turns(found, world)
    if placement.use:
        placement.use()
    base = world.on_every_rank("looking for a machine like it", lambda: _like(like, placement))
    node = world.node_gather("who is on this node", world.rank)
    near = max(world.all_gather("their nodes", len(node)))
    cores = min(world.all_gather("their cores", world.node_cores))
    way = way_of_messages(placement, world, config.comm.device, node_links.TIMEOUT_S)
    with place.waiting("measuring the device and its links"):
        dtypes = _dtypes(placement)
        links = node_links.mesh_of(world, way)
        rounds = measured_in_rounds(
            lambda: chain(
                device.measured(placement.device, dtypes), node_links.measured(links, placement.device)
            ),
            lambda is_settled: all(world.all_gather("whether rounds agree", is_settled)),
        )
        links.free()
        samples = rounds.samples()
        if placement.gpu is not None:
            samples += device.measured_host(placement.device, max(1, cores // near))
    if folder is not None:
        with place.waiting("measuring storage"):
            samples += storage.measured(world, folder, near)
    if placement.gpu is None:
        samples = [samples_of_core(each, near, cores) for each in samples]
    figures = together(world.all_gather("what they measured", samples))
    mine = rounds.lost_more(max(0.0, 1 - cores / near)), rounds.unsettled()
    lost_more, unsettled = zip(*world.all_gather("whether they were disturbed", mine))
    doubts = [*doubts_of(lost_more, unsettled, rounds.count()), *_uneven(figures)]
    ranks = counted(world.size, "ranks")
    where = f"mpitrain bench machine, {ranks}, {library.host()}, {time.strftime('%Y-%m-%d')}"
    made = machine_of(figures, base, placement.gpu, near, cores, where)
    named = f"{made.name}{', disturbed' * bool(doubts)}"
    return MeasuredMachine(msgspec.structs.replace(made, name=named, disturbed=doubts), base, figures)


def _uneven(figures: Mapping[str, MeasuredFigure]) -> list[str]:
    """Return a doubt if values of a figure differ much, also in rounds that agree."""
    names = [name for name, figure in figures.items() if figure.spread > MOST_SPREAD]
    return [f"a spread above {MOST_SPREAD:.0%} in {', '.join(names)}"] if names else []


def _dtypes(placement: DevicePlacement) -> tuple[str, ...]:
    dtypes = DTYPES[placement.device.type]
    if placement.vendor != "cuda" or tuple(map(int, placement.gpu.architecture.split("."))) < FP8_CAPABILITY:
        return tuple(dtype for dtype in dtypes if dtype != "fp8")
    return dtypes


def _like(name: str | None, placement: DevicePlacement) -> MachineFile:
    """Return the machine of a name; else the one whose alias is part of the GPU's name."""
    if name:
        return find_machine(name)
    if placement.gpu is None:
        return known()["laptop"]
    near = like_gpu(placement.gpu.name)
    if near is not None:
        return near
    raise ConfigError(
        f"found a {placement.gpu.name}, and no machine of jobs/machines/ like it; needed one whose "
        f"links and peaks replace what can't be measured; give --like, one of {', '.join(known())}"
    )


def samples_of_core(samples: Samples, near: int, cores: int) -> Samples:
    """Return samples as they were if each of the ranks of a node had a core; links and disks stay."""
    turns = max(1.0, near / cores)
    if samples.name.startswith(("links.", "storage.")):
        return samples
    faster = 1 / turns if samples.name == "launch_s" else turns
    return samples._replace(values=[faster * value for value in samples.values])


def together(every: list[list[Samples]]) -> dict[str, MeasuredFigure]:
    """Return the figures of all ranks."""
    values: dict[str, list[float]] = {}
    for samples in every:
        for name, some in samples:
            values.setdefault(name, []).extend(some)
    return {name: _figure(some) for name, some in values.items()}


def _figure(values: list[float]) -> MeasuredFigure:
    median = float(f"{statistics.median(values):.4g}")
    low, _, high = statistics.quantiles(values, n=4)
    return MeasuredFigure(median, (high - low) / median)


class _Filed(NamedTuple):
    """What was measured, as figures of a file. like: whose peaks stand beside it; None: it is its own."""

    figures: Mapping[str, MeasuredFigure]
    like: MachineFile | None
    where: str

    def figure(self, name: str, peak: Figure | None) -> Figure:
        """Return a figure, whose peak is at least what was measured."""
        found = self.figures[name]
        source = f"{self.where}, spread {found.spread:.1%}"
        if peak is None or peak.peak < found.median:
            return Figure(found.median, found.median, "as measured", source)
        return Figure(peak.peak, found.median, peak.peak_source, source)

    def table(self, name: str) -> dict[str, Figure]:
        """Return the figures of a table, such as products."""
        keys = [key.removeprefix(f"{name}.") for key in self.figures if key.startswith(f"{name}.")]
        peaks = getattr(self.like, name) if self.like else {}
        return {key: self.figure(f"{name}.{key}", peaks.get(key)) for key in keys}

    def links(self, base: LinkTable) -> LinkTable:
        """Return links, those of `base` where none were measured."""
        changes: dict[str, Figure | float] = {}
        for name in LINKS:
            if f"links.{name}" in self.figures:
                peak = getattr(self.like.links, name) if self.like else None
                changes[name] = self.figure(f"links.{name}", peak)
                changes[f"{name}_latency_s"] = self.figures[f"links.{name}_latency_s"].median
        return msgspec.structs.replace(base, **changes)


def machine_of(
    figures: Mapping[str, MeasuredFigure],
    base: MachineFile,
    gpu: Gpu | None,
    near: int,
    cores: int,
    where: str,
) -> MachineFile:
    """Return the measured machine.

    near: ranks of a node. cores: that they may use. where: it was measured.
    """
    filed = _Filed(figures, base if gpu else None, where)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // near
    # of a host the card to others was measured with as many ranks; a GPU has one of its own
    counts = near > 1 or (gpu is None and "links.between" in figures)
    return MachineFile(
        name=f"{gpu.name if gpu else f'CPU of {library.host()}'}, measured",
        device="cuda" if gpu else "cpu",
        memory_bytes=gpu.memory_bytes if gpu else memory,
        ranks_per_node=near if counts else base.ranks_per_node,
        launch_s=figures["launch_s"].median,
        products=filed.table("products"),
        attention=filed.table("attention"),
        memory=filed.table("memory"),
        links=filed.links(base.links),
        host=filed.table("host"),
        storage=filed.table("storage"),
        cores_per_node=0 if gpu else cores,
    )

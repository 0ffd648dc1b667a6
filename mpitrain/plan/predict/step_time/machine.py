"""A machine as data: a TOML file, each figure with its source, peak and sustained apart.

Those of jobs/machines/ are found by name or alias; any other by its path.
"""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
import tomli_w
from msgspec import Meta
from msgspec.structs import fields

from mpitrain.config import Config, Precision, toml_of
from mpitrain.errors import ConfigError, nearest
from mpitrain.inputs import read_text, shown
from mpitrain.plan.predict.step_time.tiles import SMALL_SUFFIX, Tiles, fitted

# of a GPU's host, guesses until they are measured: numbers that it updates a second, bytes/s to it or back
HOST_UPDATE, HOST_COPY = 1e9, 2e10
ON_GPU, ON_CPU = "h100-80gb", "laptop"  # whose figures stand for a machine that nobody has named
MOST_BYTES = 1 << 16  # of a machine's file
SHORT = "_short"  # ends the name of a figure of short sequences
GROUPED = "_grouped"  # and of products of several experts
# end the names of figures of attention by other kernels of GPUs than the one that mpitrain runs;
# with the share of its rate that a kernel has at heads of 64: on an H100 at 2,048 positions
# (arXiv:2407.08608, figures 5 and 6, mean of forward and backward); of flash1 as MosaicML's steps
# of MPT 125m and 350m on A100s say
KERNELS = {"flash1": 1.0, "flash2": 0.89, "flash3": 0.78, "cudnn": 0.77}
# of MachineRates, what a rank has of the core that it computes and copies on
OF_A_CORE = (
    "products", "attention_forward", "attention_backward", "attention_forward_16", "attention_backward_16",
    "attention_short", "memory_bandwidth", "memory_passes", "inside", "inside_latency_s", "pair",
    "pair_latency_s", "launch_s",
)  # fmt: skip
OF_A_STEP = (*OF_A_CORE, "between", "between_latency_s", "host_update", "host_copy")
# of each table, the figures that predictions read
NAMES: dict[str, tuple[str, ...]] = {
    "products": get_args(next(each.type for each in fields(Precision) if each.name == "compute")),
    "attention": tuple(
        f"{way}{kind}"
        for way in ("forward", "backward")
        for kind in ("", "_16", SHORT, f"_16{SHORT}", *(f"_{kernel}" for kernel in KERNELS))
    ),
    "memory": ("bandwidth", "passes"),
    "host": ("update", "copy"),
    "storage": ("write",),
}

TABLES = ("products", "attention", "memory", "host", "storage")
LINKS = ("inside", "between", "pair")
# of peaks, by table and device: below are GFLOP/s or GB/s, above is no device of today
BOUNDS = {
    ("products", "cuda"): (1e11, 1e17), ("products", "cpu"): (1e7, 1e15),
    ("attention", "cuda"): (1e11, 1e17), ("attention", "cpu"): (1e6, 1e15),
    ("memory", "cuda"): (1e10, 1e15), ("memory", "cpu"): (1e7, 1e14),
    ("links", "cuda"): (1e7, 1e14), ("links", "cpu"): (1e4, 1e14),
    **dict.fromkeys(itertools.product(("host", "storage"), ("cuda", "cpu")), (1e6, 1e13)),
}  # fmt: skip
LEAST_REACHED = 1e-3  # of a peak, or of a link on many nodes: below is another unit
NARROWER = ("fp64", "fp32", "bf16", "fp8")  # on a GPU each is as fast as the one before it at least
ALIKE = 1.5  # times: by so much may two figures differ that were measured, and are alike
FASTER_BETWEEN = 4.0  # times the links inside a node: beyond it one of them is of another unit
# FLOPs of a product's peak for each byte of memory's bandwidth: 5 of a core, 300 to 600 of a GPU
BALANCE = (0.05, 20_000.0)
LONGEST_LAUNCH_S = {"cuda": 1e-3, "cpu": 1e-1}
# of a GPU's memory's bandwidth, by kind of link. Between nodes: of those of today 0.006 to 0.021, of their
# bits 0.05 on; inside: 0.017 to 0.19, of bits 0.3 to 1.5, a copy between two ranks of one GPU 0.5 at most
MOST_OF_MEMORY = {"between": 0.08, "inside": 0.6, "pair": 0.6}
MOST_GPUS = 1024  # of a node, or of what NVLink connects: 72 today
GPU_BYTES = (1 << 28, 1 << 43)
MOST_ON_A_CORE = 32  # ranks that take turns
SPARSE = 1.5  # times the dense peak of a GPU of that name: beyond is that with sparsity

# a second: below are TFLOP/s or GB/s that were typed as FLOP/s or bytes/s
Rate = Annotated[float, Meta(ge=1e4, lt=1e24)]
LONGEST_LATENCY_S = 0.1
Latency = Annotated[float, Meta(ge=0, le=LONGEST_LATENCY_S)]
DataType = Annotated[str, Meta(pattern="^[a-z0-9_]{1,32}$")]


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a data sheet says and what is reached, a second; and who says so."""

    peak: Rate
    sustained: Rate
    peak_source: str
    sustained_source: str


class LinkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Links of one rank in one direction, bytes/s: inside a node, and between nodes.

    contention: the share that is left of `between` on `contended_nodes` nodes and more. pair: between
    ranks 2 i and 2 i + 1 of a node, where they have a link of their own, as the two dies of a GPU.
    """

    inside: Figure
    inside_latency_s: Latency
    between: Figure
    between_latency_s: Latency
    contention: Annotated[float, Meta(ge=LEAST_REACHED, le=1)] = 1.0
    contended_nodes: Annotated[int, Meta(ge=1)] = 64
    pair: Figure | None = None
    pair_latency_s: Latency | None = None


class Spread(NamedTuple):
    """What steps took over what figures predict: 10 % quantile, median, 90 % quantile."""

    low: float
    middle: float
    high: float


# of figures from data sheets and others' measurements: the steps of
# benchmarks/published_layouts.csv, each system as much as another (mpitrain plan backtest,
# 2026-11-30)
OF_SHEETS = Spread(0.96, 1.06, 1.45)
# of `mpitrain bench machine` on the machine itself: docs/guides/planning.md, steps on CPUs, an
# H100, an H200
OF_MEASURED = Spread(0.9, 1.0, 1.15)
MEASURED = "mpitrain bench machine"  # begins the source of what was measured so
CALIBRATED = "; calibrated"  # after the source that a figure had before


class MachineFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine's file.

    device: whose memory memory_bytes are: of a GPU, of any make, or of the host. products: FLOP/s
    by type of number; of a CPU fp32_small those of small ones. attention: FLOP/s, forward and
    backward; of a CPU in 16 bits forward_16 and backward_16. cores_per_node: of a CPU, that the
    ranks of a node share; 0: each rank has its own. host: of a GPU's host, for memory.offload:
    numbers that it updates a second, "update", and bytes/s to it or back, "copy". storage:
    bytes/s of checkpoints that a node writes, "write". start_s: from the start of a job's
    processes until all ranks have met; 0: not known. disturbed: why what was measured can't be
    trusted. spread: of what steps took over what these figures predict, three numbers; none: by
    who measured the figures.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    device: Literal["cuda", "cpu"]
    memory_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 50)]
    ranks_per_node: Annotated[int, Meta(ge=1, le=1 << 20)]
    launch_s: Latency
    products: Annotated[dict[DataType, Figure], Meta(min_length=1)]
    attention: dict[str, Figure]
    memory: dict[str, Figure]
    links: LinkTable
    aliases: list[str] = []
    host: dict[str, Figure] = {}
    storage: dict[str, Figure] = {}
    cores_per_node: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    start_s: Annotated[float, Meta(ge=0, le=7_200)] = 0.0
    disturbed: list[str] = []
    spread: Annotated[list[Annotated[float, Meta(gt=0.05, lt=20)]], Meta(max_length=3)] = []

    def expected(self) -> Spread:
        """Return what steps took over predictions, as the file says or by its sources."""
        if self.spread:
            return Spread(*self.spread)
        sources = [figure.sustained_source for figure in self.products.values()]
        own = any(source.startswith(MEASURED) or CALIBRATED in source for source in sources)
        return OF_MEASURED if own else OF_SHEETS

    def to_toml(self) -> str:
        """Return the text of its file."""
        tree = msgspec.to_builtins(self)
        if not self.disturbed:  # which older versions don't know
            del tree["disturbed"]
        return tomli_w.dumps(tree)

    def attention_of(self, way: str, kernel: str) -> Figure:
        """Return attention's figure of a kernel; without one in the file, that of mpitrain's own."""
        return self.attention.get(f"{way}_{kernel}", self.attention[way])

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield all figures, each with its key."""
        for table in TABLES:
            for key, figure in getattr(self, table).items():
                yield f"{table}.{key}", figure
        for link in LINKS:
            if (figure := getattr(self.links, link)) is not None:
                yield f"links.{link}", figure

    def with_figures(self, change: Callable[[str, Figure], Figure]) -> "MachineFile":
        """Return the machine with other figures. change: makes one of its key and what it was."""
        changed = {key: change(key, figure) for key, figure in self.figures()}
        tables = {
            table: {name: changed[f"{table}.{name}"] for name in getattr(self, table)} for table in TABLES
        }
        links = {link: changed[f"links.{link}"] for link in LINKS if f"links.{link}" in changed}
        replace = msgspec.structs.replace
        return replace(self, links=replace(self.links, **links), **tables)


class MachineRates(NamedTuple):
    """What predictions need of a machine: rates of one rank a second, from sheet or measurement.

    peaks: FLOP/s of products on the data sheet, which MFU is a share of.
    cores_per_node: that the ranks of a node share; 0: each has its own.
    attention_short: FLOP/s of short sequences, by the figure of long ones, as "forward_16"; of a CPU.
    tiles: of a CPU's products by type, where they were measured.
    host_update, host_copy: numbers that a GPU's host updates a second, bytes/s to it or back; 0: not known.
    memory_passes: bytes/s of what stands between the products of a block, in fp32; 0: not measured.
    storage_write: bytes/s of checkpoints that a node writes; 0: not known.
    pair: bytes/s of neighbours that have a link of their own; 0: they have that of the node.
    doubt: why these can't be trusted, in words; "": they can.
    attention_narrow: on a GPU, the share of attention's rate that is left at heads of 64.
    spread: of what steps took over what is predicted.
    """

    name: str
    on_gpu: bool
    products: Mapping[str, float]
    attention_forward: float
    attention_backward: float
    memory_bandwidth: float
    memory_bytes: int
    ranks_per_node: int
    launch_s: float
    inside: float
    inside_latency_s: float
    between: float
    between_latency_s: float
    contention: float
    contended_nodes: int
    peaks: Mapping[str, float]
    attention_forward_16: float = 0.0
    attention_backward_16: float = 0.0
    cores_per_node: int = 0
    attention_short: Mapping[str, float] = {}
    memory_passes: float = 0.0
    tiles: Mapping[str, Tiles] = {}
    host_update: float = 0.0
    host_copy: float = 0.0
    storage_write: float = 0.0
    pair: float = 0.0
    pair_latency_s: float = 0.0
    start_s: float = 0.0
    doubt: str = ""
    attention_narrow: float = KERNELS["flash2"]
    spread: Spread = OF_MEASURED

    def __hash__(self) -> int:
        """Return a hash by the figures that are numbers: what was computed of a machine is kept."""
        return hash((self.name, self.memory_bandwidth, self.inside, self.between, self.ranks_per_node))

    @property
    def knows_offload(self) -> bool:
        """Whether it is known what memory.offload takes, and no guess.

        A CPU copies from its memory to its memory.
        """
        return not self.on_gpu or (self.host_update > 0 and self.host_copy > 0)

    @property
    def sends_meanwhile(self) -> bool:
        """Whether messages travel under computation: a CPU copies them, if there is one for it."""
        return self.on_gpu or not self.cores_per_node or self.cores_per_node > self.ranks_per_node

    def with_ranks_per_node(self, count: int) -> "MachineRates":
        """Return the same node with so many ranks on it; 0: as it is.

        More ranks of a CPU's divide its memory. Of fewer each has no more than the file says: that
        can be an estimate of one rank. They have one card to other nodes; GPUs have one each.
        """
        if not count:
            return self
        if self.on_gpu:
            return self._replace(ranks_per_node=count)
        memory = min(self.memory_bytes, self.memory_bytes * self.ranks_per_node // count)
        between = self.between * self.ranks_per_node / count
        return self._replace(ranks_per_node=count, memory_bytes=memory, between=between)

    def in_median(self) -> "MachineRates":
        """Return a machine whose steps are predicted to take what those of this one take in the median."""
        return self.slower(self.spread.middle, OF_A_STEP)

    def slower(self, times: float, fields: Iterable[str]) -> "MachineRates":
        """Return the machine with some figures so many times slower: rates fall, seconds grow."""
        changed: dict[str, Any] = {}
        for field in fields:
            value = getattr(self, field)
            if isinstance(value, Mapping):
                changed[field] = {name: rate / times for name, rate in value.items()}
            else:
                changed[field] = value * times if field.endswith("_s") else value / times
        return self._replace(**changed)


def as_fast_as(machine: MachineFile, peak: float) -> MachineFile:
    """Return a machine whose products have another peak, in FLOP/s; alike all that a rank does by itself."""
    faster = peak / max(figure.peak for figure in machine.products.values())
    replace = msgspec.structs.replace

    def scaled(key: str, figure: Figure) -> Figure:
        if key.partition(".")[0] not in ("products", "attention", "memory"):
            return figure
        return replace(figure, peak=faster * figure.peak, sustained=faster * figure.sustained)

    return replace(machine.with_figures(scaled), launch_s=machine.launch_s / faster)


def machine_of(found: MachineFile, sheet: bool = False, kernel: str = "") -> MachineRates:
    """Return the rates of a machine.

    sheet: those of the data sheet, not the sustained ones. kernel: of attention on a GPU, one of
    KERNELS, where the file has figures of it; "": the one that mpitrain runs.
    """

    def rate(figure: Figure | None) -> float:
        if figure is None:
            return 0.0
        return figure.peak if sheet else figure.sustained

    links = found.links
    products = {dtype: rate(figure) for dtype, figure in found.products.items()}
    tiles = {}
    measured = [each for each in products if each + SMALL_SUFFIX in products and found.device == "cpu"]
    for dtype in measured:
        products[dtype], tiles[dtype] = fitted(products[dtype], products.pop(dtype + SMALL_SUFFIX))
    short = {name: figure for name, figure in found.attention.items() if name.endswith(SHORT)}
    return MachineRates(
        name=found.name,
        on_gpu=found.device == "cuda",
        products=products,
        attention_forward=rate(found.attention_of("forward", kernel)),
        attention_backward=rate(found.attention_of("backward", kernel)),
        memory_bandwidth=rate(found.memory["bandwidth"]),
        memory_bytes=found.memory_bytes,
        ranks_per_node=found.ranks_per_node,
        launch_s=found.launch_s,
        inside=rate(links.inside),
        inside_latency_s=links.inside_latency_s,
        between=rate(links.between),
        between_latency_s=links.between_latency_s,
        contention=1.0 if sheet else links.contention,
        contended_nodes=links.contended_nodes,
        peaks={dtype: found.products[dtype].peak for dtype in products},
        attention_forward_16=rate(found.attention.get("forward_16")),
        attention_backward_16=rate(found.attention.get("backward_16")),
        cores_per_node=found.cores_per_node,
        attention_short={name.removesuffix(SHORT): rate(figure) for name, figure in short.items()},
        memory_passes=rate(found.memory.get("passes")),
        tiles=tiles,
        host_update=rate(found.host.get("update")),
        host_copy=rate(found.host.get("copy")),
        storage_write=rate(found.storage.get("write")),
        pair=rate(links.pair),
        pair_latency_s=links.pair_latency_s or 0.0,
        start_s=found.start_s,
        doubt="; ".join(found.disturbed),
        attention_narrow=KERNELS[kernel or "flash2"],
        spread=found.expected(),
    )


def rates_of(config: Config, node_ranks: int = 0, unnamed: str = ON_CPU) -> MachineRates:
    """Return the figures of run.machine with the nodes of a run. Raises ConfigError.

    node_ranks: of a node; comm.node_ranks overrides it, 0: as many as the machine has.
    unnamed: the machine that stands for none.
    """
    rates = machine_of(find_machine(config.run.machine or unnamed))
    return rates.with_ranks_per_node(config.comm.node_ranks or node_ranks)


@cache
def known() -> dict[str, MachineFile]:
    """Return the machines of jobs/machines/ by their file's name."""
    folder = resources.files("mpitrain.jobs") / "machines"
    paths = sorted(
        (each for each in folder.iterdir() if each.name.endswith(".toml")), key=lambda each: each.name
    )
    return {each.name.removesuffix(".toml"): read_machine(str(each)) for each in paths}


def find_machine(name: str) -> MachineFile:
    """Return a machine by the name of its file, by an alias, or by a path.

    Raises ConfigError for one that isn't known, with the nearest.
    """
    if not name.endswith(".toml"):
        try:
            return known_machine(name)
        except ConfigError:
            if os.path.exists(name):
                raise ConfigError(f"machine {shown(name)}: needed a file whose name ends in .toml") from None
            raise
    found = read_machine(name)
    _require_dense(found, name)
    return found


def _require_dense(found: MachineFile, path: str) -> None:
    """Raise ConfigError for a peak with sparsity, which a GPU's name tells."""
    alike = like_gpu(found.name) if found.device == "cuda" else None
    for dtype in ("bf16", "fp16", "fp8"):
        if alike is None or not {dtype} <= found.products.keys() & alike.products.keys():
            continue
        peak, dense = found.products[dtype].peak, alike.products[dtype].peak
        if peak > SPARSE * dense:
            raise ConfigError(
                f"machine {shown(path)}: products.{dtype}: peak = {peak:g} of {shown(found.name)}; needed "
                f"the peak without sparsity, as {alike.name} has {dense:g}"
            )


def known_machine(name: str) -> MachineFile:
    """Return a machine of jobs/machines/ by the name of its file, or by an alias; no path is opened.

    Raises ConfigError as find_machine() does.
    """
    keys = _keys_by_letters()
    key = keys.get(_letters(name)) or keys.get(_letters(name.split(",")[0]))
    if key is not None:
        return known()[key]
    near = nearest(_letters(name), keys)
    hint = f"did you mean {keys[near]}? " if near else ""
    raise ConfigError(
        f"machine {shown(name)}: found no such machine; {hint}needed one of {', '.join(known())}, "
        "or the path of a file like those of jobs/machines/"
    )


def like_gpu(name: str) -> MachineFile | None:
    """Return the machine of jobs/machines/ whose alias is a word of a GPU's name; None: there is none."""
    words = set(name.replace("-", " ").split())
    return next((each for each in known().values() if words & set(each.aliases)), None)


@cache
def _keys_by_letters() -> dict[str, str]:
    keys = [(key, key) for key in known()]
    keys += [(name, key) for key, found in known().items() for name in (found.name, *found.aliases)]
    return {_letters(name): key for name, key in keys}


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def read_machine(path: str) -> MachineFile:
    """Read a machine's file.

    Raises ConfigError for a figure that is missing, unknown or out of its bounds.
    """
    try:
        text = read_text(path, MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"machine {shown(path)}: {error.strerror}; give the path of a TOML file") from None
    tree = toml_of(text, Path(path))
    for key, value in _figures(tree):
        if not math.isfinite(value):
            raise ConfigError(f"machine {shown(path)}: {shown(key)} = {value}; needed a finite number")
    try:
        found = msgspec.convert(tree, MachineFile)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"machine {shown(path)}: {shown(_with_key(error, tree))}; needed the keys of "
            "jobs/machines/h100-80gb.toml, in FLOP/s, bytes/s, bytes and seconds"
        ) from None
    checks = _of_keys, _of_names, _of_figures, _of_pairs, _of_gpu
    for trouble in itertools.chain.from_iterable(check(found) for check in checks):
        raise ConfigError(f"machine {shown(path)}: {trouble}")
    return found


def _with_key(error: Exception, tree: Mapping[str, Any]) -> str:
    """Return msgspec's message with the key of the figure that it has as [...]."""
    text = str(error)
    table = re.search(r"\$\.(\w+)\[\.\.\.\]", text)
    entries = tree[table[1]] if table else None
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        try:
            msgspec.convert(entry, Figure)
        except msgspec.ValidationError:
            return text.replace("[...]", f".{key}")
    return text


def _of_keys(machine: MachineFile) -> Iterator[str]:
    """Yield what can't be printed, and what is missing or not whole."""
    for key, text in (("name", machine.name), *(("disturbed", text) for text in machine.disturbed)):
        if not text.isprintable():
            yield f"{key} = {shown(text)}; needed one that can be printed"
    for table, key in (("attention", "forward"), ("attention", "backward"), ("memory", "bandwidth")):
        if key not in getattr(machine, table):
            yield f"found no {table}.{key}; needed peak and sustained of it"
    if machine.spread and (len(machine.spread) != 3 or machine.spread != sorted(machine.spread)):
        yield (
            f"spread = {machine.spread}; needed three numbers that don't fall: at the 10 % quantile, in the "
            "median, at the 90 %"
        )
    if (machine.links.pair is None) != (machine.links.pair_latency_s is None):
        yield "found one of links.pair and links.pair_latency_s; needed both, or none"


def _of_names(machine: MachineFile) -> Iterator[str]:
    """Yield figures that no prediction reads."""
    for table, names in NAMES.items():
        for key in getattr(machine, table):
            name = _large(key) if table == "products" else key
            if name not in names:
                near = nearest(name, names)
                hint = f"did you mean {near}? " if near else ""
                yield f"{table}.{shown(key)}: found no such figure; {hint}needed one of {', '.join(names)}"
    for key in machine.products:
        if _large(key) not in machine.products:
            yield f"found products.{key} without products.{_large(key)}; needed that too"
        if key.endswith(SMALL_SUFFIX) and machine.device == "cuda":
            yield f"products.{key}: small products are read of a CPU only; leave it out"


def _of_figures(machine: MachineFile) -> Iterator[str]:
    """Yield what is wrong with a figure: no device has it, or its numbers differ in unit."""
    for key, figure in machine.figures():
        if figure.sustained > figure.peak:
            yield (
                f"{shown(key)}: sustained = {figure.sustained:g} is above "
                f"peak = {figure.peak:g}; needed no more than that, both in the same unit"
            )
        table = key.partition(".")[0]
        low, high = BOUNDS[table, machine.device]
        unit = "FLOP/s" if table in ("products", "attention") else "bytes/s"
        unit = "numbers a second" if key == "host.update" else unit
        if not low <= figure.peak <= high:
            kind = "GPU" if machine.device == "cuda" else "CPU"
            yield f"{shown(key)}: peak = {figure.peak:g} of a {kind}; needed {low:g} to {high:g} {unit}"
        if figure.sustained < LEAST_REACHED * figure.peak:
            yield (
                f"{shown(key)}: sustained = {figure.sustained:g} is less than {LEAST_REACHED:g} of "
                f"peak = {figure.peak:g}; needed both in {unit}"
            )


def _of_pairs(machine: MachineFile) -> Iterator[str]:
    """Yield figures that contradict one another."""
    links = machine.links
    fastest = max(figure.peak for figure in machine.products.values())
    bandwidth = machine.memory["bandwidth"].peak
    # sheets of hosts give their memory's peak, and say little of the links of processes
    for kind in ("peak", "sustained") if machine.device == "cuda" else ("sustained",):
        between, inside = getattr(links.between, kind), getattr(links.inside, kind)
        for key, figure in machine.attention.items():
            rate = getattr(figure, kind)
            if not LEAST_REACHED * fastest <= rate <= fastest:
                yield (
                    f"attention.{key}: {kind} = {rate:g} beside products of {fastest:g}; needed "
                    f"{LEAST_REACHED:g} to 1 times as much, both in FLOP/s"
                )
        if between > FASTER_BETWEEN * inside:
            yield (
                f"links.between: {kind} = {between:g} is more than {FASTER_BETWEEN:g} times "
                f"links.inside's {inside:g}; needed both in bytes/s of one rank"
            )
        if inside > 2 * bandwidth:
            yield (
                f"links.inside: {kind} = {inside:g} is more than twice memory.bandwidth's "
                f"peak, {bandwidth:g}; needed both in bytes/s of one rank"
            )
    if not BALANCE[0] <= fastest / bandwidth <= BALANCE[1]:
        yield (
            f"memory.bandwidth: peak = {bandwidth:g} beside products of {fastest:g} FLOP/s, "
            f"{fastest / bandwidth:.3g} for each byte; needed {BALANCE[0]:g} to {BALANCE[1]:,.0f}"
        )
    if machine.ranks_per_node > MOST_ON_A_CORE * machine.cores_per_node > 0:
        yield (
            f"cores_per_node = {machine.cores_per_node} beside ranks_per_node = {machine.ranks_per_node}; "
            f"needed a core for {MOST_ON_A_CORE} ranks at least"
        )
    if machine.launch_s > LONGEST_LAUNCH_S[machine.device]:
        yield f"launch_s = {machine.launch_s:g}; needed {LONGEST_LAUNCH_S[machine.device]:g} s at most"
    if links.inside_latency_s > 100 * links.between_latency_s > 0:
        yield (
            f"links.inside_latency_s = {links.inside_latency_s:g} is more than 100 times "
            f"links.between_latency_s = {links.between_latency_s:g}; needed both in seconds"
        )


def _of_gpu(machine: MachineFile) -> Iterator[str]:
    """Yield figures that no GPU has beside one another."""
    if machine.device != "cuda":
        return
    bandwidth = machine.memory["bandwidth"].peak
    known = [dtype for dtype in NARROWER if dtype in machine.products]
    for wide, narrow in itertools.pairwise(known):
        if machine.products[wide].peak > ALIKE * machine.products[narrow].peak:
            yield f"products.{wide}: found a higher peak than products.{narrow}; needed both in FLOP/s"
    least, most = GPU_BYTES
    if not least <= machine.memory_bytes <= most:
        yield f"memory_bytes = {machine.memory_bytes:,} of a GPU; needed {least:,} to {most:,} bytes"
    if machine.ranks_per_node > MOST_GPUS:
        yield f"ranks_per_node = {machine.ranks_per_node} GPUs; needed {MOST_GPUS} at most, those of one node"
    for name, share in MOST_OF_MEMORY.items():
        link = getattr(machine.links, name)
        if link is not None and link.peak > share * bandwidth:
            yield (
                f"links.{name}: peak = {link.peak:g} is more than {share:g} of memory.bandwidth's "
                f"{bandwidth:g}; needed bytes/s of one rank, not bits"
            )
    if "copy" in machine.host and machine.host["copy"].peak > bandwidth:
        yield f"host.copy: found a higher peak than memory.bandwidth, {bandwidth:g}; needed bytes/s"


def _large(key: str) -> str:
    """Return the name of the rate of large products, one at a time, beside which a rate of others stands."""
    return key.removesuffix(SMALL_SUFFIX).removesuffix(GROUPED)


def _figures(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the floats of a tree of tables, each with its key: nan passes bounds."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _figures(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield f"{prefix}{key}", value

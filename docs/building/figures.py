"""What figures in pages are computed by, in one process: expressions of the markers that docs/build.py reads.

    default("comm.timeout_s")                       the default of a key
    rank("jobs/tiny.toml", 2, "parallel.tp=2")      a rank of a layout: what it holds and sends
    source("mpitrain/weights/tokens.py", "LIMIT")   a constant of the source, where it isn't a key

Sizes are bytes and times are seconds: the expression divides.
"""

import importlib
import json
import math
import re
import tempfile
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from mpitrain.actor.rehearsal import Rehearsal
from mpitrain.cli import cli
from mpitrain.comm.base.grid import Grid
from mpitrain.commands import inspect
from mpitrain.commands.plan import backtest as planning
from mpitrain.commands.reference.keys import every_key
from mpitrain.commands.schedule.request import Request, play
from mpitrain.errors import ScheduleError
from mpitrain.plan.declared.family import FAMILIES  # noqa: F401 expressions name it
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory import MemoryUsage, predict
from mpitrain.plan.settings.job_ranks import JobRanks
from mpitrain.planner.backtest_errors import predict_rows
from mpitrain.schedules.catalog import NAMES  # noqa: F401 expressions name it

ROOT = Path(__file__).resolve().parents[2]
KB, MB, GB = 1e3, 1e6, 1e9
KIB, MIB, GIB = 2**10, 2**20, 2**30


def evaluated(expression: str) -> str:
    """Return the value of an expression over this file as text, the items of a list one after the other."""
    value = eval(expression, {**globals(), "math": math})
    return value if isinstance(value, str) else " ".join(map(_text, _items(value)))


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _text(value: Any) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)


def default(key: str) -> Any:
    """Return the default of a key."""
    value = every_key()[key].default
    return json.loads(value) if re.fullmatch(r'[\d."\[\], -]+', value) else value


def default_of(key: str, owner: str) -> list[float]:
    """Return the default that a family or an optimiser gives a key, a list of one or more numbers."""
    value = json.loads(every_key()[key].uses[owner])
    return value if isinstance(value, list) else [value]


def option(name: str, *command: str) -> Any:
    """Return the default of an option of a command."""
    found: Any = cli
    for word in command:
        found = found.commands[word]
    return next(each.default for each in found.params if each.name == name)


def rows(page: str, head: str) -> list[list[str]]:
    """Return the cells of the table of a page whose head has a text: others are derived from them."""
    text = (ROOT / page).read_text()
    lines = text[text.index("\n", text.index(head)) :].split("\n\n")[0].strip().splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def numbers(text: str) -> list[float]:
    """Return the numbers of a text."""
    return [float(_plain(found)) for found in re.findall(r"\d[\d.,]*", text)]


def source(path: str, *names: str) -> Any:
    """Return the values of names of a module, private ones too; of one name without a list."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    values = [getattr(module, name) for name in names]
    return values[0] if len(values) == 1 else values


class Rank:
    """The first rank of each pipeline rank of a layout, and what a rank sends.

    number: of the rank that sends.
    """

    def __init__(self, plan: Plan, number: int = 0):
        self.plan = plan
        self.number = number

    @cached_property
    def parameters(self) -> int:
        return sum(spec.numel for spec in self.plan.parameters())

    @cached_property
    def usages(self) -> list[MemoryUsage]:
        return predict(self.plan, on_gpu=self.plan.config.run.device == "cuda")

    @cached_property
    def first(self) -> MemoryUsage:
        """What a rank of the first pipeline rank holds, in bytes."""
        return self.usages[0]

    @cached_property
    def fullest(self) -> MemoryUsage:
        """What a rank of the fullest pipeline rank holds, in bytes."""
        return max(self.usages, key=lambda usage: usage.on_device)

    @cached_property
    def traffic(self) -> list[tuple[str, str, int, float]]:
        """What the rank sends in a step: axis, operation, calls, megabytes."""
        rows = [line.split() for line in Rehearsal(self.plan, self.number).table().splitlines()[1:]]
        return [(row[0], row[2], int(_plain(row[3])), float(_plain(row[5]))) for row in rows]

    def sent(self, *, axis: str = "", operation: str = "") -> float:
        """Return the bytes that the rank sends over an axis, by an operation, or all."""
        return MB * sum(row[3] for row in self.traffic if axis in ("", row[0]) and operation in ("", row[1]))

    def calls(self, *, axis: str = "", operation: str = "") -> int:
        return sum(row[2] for row in self.traffic if axis in ("", row[0]) and operation in ("", row[1]))


def _plain(number: str) -> str:
    return number.replace(",", "")


@cache
def rank(config: str | None, num_ranks: int, *overrides: str, node_ranks: int = 0) -> Rank:
    """Plan a layout; return its ranks. config: a file, from the top of the tree; None for the default."""
    path = str(ROOT / config) if config else None
    ranks = JobRanks.filling(num_ranks, node_ranks or num_ranks)
    return Rank(inspect.planned(path, overrides, ranks))


def table(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as a table in Markdown, the first one as its head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines.insert(1, "|---" * (lines[0].count(" | ") + 1) + "|")
    return "\n".join(lines)


# -------------------------------------------------- guides/zero-and-memory.md

LLAMA3_8B = (
    "model.preset=llama3-8b",
    "precision.compute=bf16",
    "batch.global=32",
    "batch.micro=1",
    "data.sequence=2048",
)


def zero(stage: int, *overrides: str) -> Rank:
    """Return a rank of 8 that train llama3-8b."""
    return rank(None, 8, *LLAMA3_8B, "parallel.dp=8", f"parallel.zero={stage}", *overrides)


def zero_row(stage: int) -> list[float]:
    """Return gigabytes: weights, gradients, moments, lent, on the device; weights and gradients sent."""
    ranks = zero(stage)
    first, kinds = ranks.first, {"gradients": ("all_reduce", "reduce_scatter"), "weights": ("all_gather",)}
    held = first.weights, first.gradients, first.moments, first.lent, first.on_device
    sent = (sum(ranks.sent(operation=name) for name in kinds[kind]) for kind in ("weights", "gradients"))
    return [num_bytes / GB for num_bytes in (*held, *sent)]


def recompute_row(mode: str) -> list[float]:
    """Return gigabytes of ZeRO-1: kept by microbatches, recomputed together, on the device."""
    first = zero(1, f"memory.recompute={mode}").first
    return [num_bytes / GB for num_bytes in (first.activations, first.recomputed, first.on_device)]


def two_nodes(stage: int = 1) -> int:
    """Return the bytes for messages of llama3-8b on two nodes of four ranks."""
    keys = f"parallel.zero={stage}", "batch.global=8", "comm.node_ranks=4"
    return rank(None, 8, *LLAMA3_8B, "parallel.dp=8", *keys, node_ranks=4).first.messages


def tp_calls(regather: str) -> list[int]:
    """Return the all-gathers and the reduce-scatters of a block and microbatch over tp."""
    keys = "parallel.tp=2", "parallel.sequence=true", f"parallel.regather={regather}", "batch.micro=1"
    two, one = (rank("jobs/tiny.toml", 2, *keys, f"model.layers={layers}") for layers in (2, 1))
    names = "all_gather", "reduce_scatter"
    more = (two.calls(axis="tp", operation=name) - one.calls(axis="tp", operation=name) for name in names)
    return [calls // two.plan.num_microbatches for calls in more]


def regathered(mode: str, regather: str) -> int:
    """Return the bytes that llama3.1-405b keeps, with TP 8 and PP 16 on GPUs."""
    keys = "model.preset=llama3.1-405b", "data.sequence=8192", "parallel.tp=8", "parallel.pp=16"
    of_run = "precision.compute=bf16", "batch.micro=1", "batch.global=16", "run.device=cuda"
    modes = f"memory.recompute={mode}", f"parallel.regather={regather}"
    return rank(None, 128, *keys, *of_run, *modes).first.activations


def four_stages(sequence: int) -> list[float]:
    """Return the gigabytes of llama3-8b in fp32 on four stages, with v-half and with 1f1b."""
    keys = "model.preset=llama3-8b", "parallel.pp=4", "batch.micro=1", "batch.global=16"
    schedules = (f"pipeline.schedule={name}" for name in ("v-half", "1f1b"))
    plans = (rank(None, 4, *keys, f"data.sequence={sequence}", name) for name in schedules)
    return [ranks.fullest.on_device / GB for ranks in plans]


# -------------------------------------------------- other pages


def least_batch() -> int:
    """Return the batch of a run on one rank that hasn't been given one."""
    return rank(None, 1, "batch.global=0").plan.config.batch.global_


def reference_sizes() -> list[int]:
    model = rank(None, 1, "model.preset=reference").plan.config.model
    return [model.layers, model.width, model.heads, model.kv_heads, model.ffn, model.vocab]


def shown(page: str, pattern: str) -> list[float]:
    """Return the numbers of the groups of a pattern, at its first place in a page."""
    found = re.search(pattern, (ROOT / page).read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"{pattern!r} isn't in {page}")
    return [float(_plain(group)) for group in found.groups()]


# -------------------------------------------------- guides/published-layouts.md

PUBLISHED = "precision.compute=bf16", "run.device=cuda"


def llama3_405b(*overrides: str) -> Rank:
    """Return a rank of Llama 3 405B on 16,384 GPUs."""
    layout = "parallel.tp=8", "parallel.pp=16", "parallel.dp=128", "data.sequence=8192", "batch.global=2048"
    keys = "model.preset=llama3.1-405b", *layout, *PUBLISHED, "comm.node_ranks=8", *overrides
    return rank(None, 16384, *keys, node_ranks=8)


def deepseek_v3(*overrides: str) -> Rank:
    """Return a rank of DeepSeek-V3 on 2,048 GPUs."""
    layout = "parallel.pp=16", "parallel.ep=64", "data.sequence=4096", "batch.global=15360"
    keys = "model.preset=deepseek-v3", *layout, *PUBLISHED, "comm.node_ranks=8", *overrides
    return rank(None, 2048, *keys, node_ranks=8)


# -------------------------------------------------- guides/planning.md


@cache
def _backtested(name: str) -> str:
    return planning.backtest(str(ROOT / f"benchmarks/{name}_layouts.csv"))


def backtest(*patterns: str, name: str = "published") -> list[float]:
    """Return the numbers of the groups of patterns in what `mpitrain plan backtest` prints.

    name: of the file, published_layouts.csv or unseen_layouts.csv.
    """
    found = (re.search(pattern, _backtested(name)) for pattern in patterns)
    return [float(_plain(group)) for match in found if match for group in match.groups()]


def backtest_counts() -> list[float]:
    """Return the rows: predicted, all, between bounds, held by bounds, of so many with a time, refused."""
    rows, predicted, bounded, refused = backtest(r"(\d+) rows; (\d+) predicted, (\d+) between .*, (\d+) ref")
    share, timed = backtest(r"bounds of unknown fields hold +([\d.]+) % of (\d+)")
    return [predicted, rows, bounded, round(share / 100 * timed), timed, refused]


def backtest_intervals() -> list[float]:
    share, of_rows = backtest(r"80 % intervals hold +([\d.]+) % of (\d+) rows")
    return [round(share / 100 * of_rows), of_rows, share]


def fetched_experts() -> list[float]:
    """Return how many published steps have experts and ZeRO-3, and least and most measured over predicted."""
    rows = predict_rows(str(ROOT / "benchmarks/published_layouts.csv")).rows
    own = [each for each in rows if each.row.layout.zero == 3 and each.row.model.experts]
    ratios = [each.measured / each.found.seconds for each in own]
    return [len(ratios), min(ratios), max(ratios)]


def state_bytes(*overrides: str) -> float:
    """Return the bytes of a parameter that a checkpoint has: weight and moments in fp32, or as given."""
    first = rank(None, 1, "parallel.zero=0", *overrides)
    return 4 + first.first.moments // first.parameters


def sizes(config: str) -> list[float]:
    """Return of a configuration: millions of parameters, blocks, their width, sequences, tokens of one."""
    ranks = rank(config, 1)
    model, batch, data = ranks.plan.config.model, ranks.plan.config.batch, ranks.plan.config.data
    return [ranks.parameters / 1e6, model.layers, model.width, batch.global_, data.sequence]


def experts(config: str) -> list[int]:
    """Return how many experts a layer has, and how many of them a token meets."""
    found = rank(config, 1).plan.config.experts
    return [found.count, found.active]


# -------------------------------------------------- the course

SMALL = "docs/course/small.toml"


def course_shape(*overrides: str) -> list[int]:
    """Return of small.toml: blocks, microbatches of a rank, tokens of one, heads, key-value heads."""
    plan = rank(SMALL, 4, *overrides).plan
    model = plan.config.model
    return [model.layers, plan.num_microbatches, plan.config.data.sequence, model.heads, model.kv_heads]


def bytes_of_a_parameter() -> list[float]:
    """Return the bytes of a parameter in fp32: all, weight, gradient, moments, all."""
    ranks = rank(SMALL, 1)
    first = ranks.first
    held = [num_bytes // ranks.parameters for num_bytes in (first.weights, first.gradients, first.moments)]
    return [sum(held), *held, sum(held)]


def precision(dtype: str) -> int:
    """Return the bits of precision of a type of torch."""
    return round(1 - math.log2(torch.finfo(getattr(torch, dtype)).eps))


def half_of_least(dtype: str) -> int:
    """Return n, where 2**-n is half of the smallest number of a type of torch."""
    info = torch.finfo(getattr(torch, dtype))
    return round(1 - math.log2(info.smallest_normal * info.eps))


# -------------------------------------------------- more pages


def traffic(num_ranks: int, axis: str, *overrides: str) -> list[float]:
    """Return the calls and the megabytes sent over an axis in a step of the default: means of ranks."""
    ranks = [Rank(rank(None, num_ranks, *overrides).plan, number) for number in range(num_ranks)]
    calls, sent = (
        sum(values) for values in zip(*((each.calls(axis=axis), each.sent(axis=axis)) for each in ranks))
    )
    return [calls / num_ranks, sent / num_ranks / MB]


def crossing_rows(active: int, count: int, nodes: int) -> list[float]:
    """Return these, and the rows of a token that leave its node: once a node, and once an expert."""
    elsewhere = count - count // nodes
    a_node = (nodes - 1) * (1 - math.comb(elsewhere, active) / math.comb(count, active))
    return [active, count, nodes, a_node, active * (nodes - 1) / nodes]


def tokenized() -> list[float]:
    """Return what follows from the measured text and its tokens in guides/data.md."""
    page = "docs/guides/data.md"
    (text,) = shown(page, r"^([\d.]+) MB of Python")
    tokens, seconds = shown(page, r"^\| a BPE .*? ([\d.]+) M, .* (\d+) s on 2 ranks")
    of_a_token, rate = text / tokens, text / seconds / 2
    billions, hours = 40 / of_a_token, 40e3 / rate / 3600
    sizes = of_a_token, 2 * tokens, 2 * rate, rate, billions, 2 * billions, 4 * billions
    return [*sizes, hours, hours / 2, hours * 60 / 64, 64 * rate]


def grid_of_axes() -> list[list[int]]:
    """Return the coordinates of rank 5 of tp(2) x dp(2) x pp(2); by pp, the ranks and a group of it."""
    grid = Grid({"tp": 2, "dp": 2, "pp": 2})
    rows = [[*range(4 * pp, 4 * pp + 4), *grid.group(5, axis)] for pp, axis in enumerate(("tp", "pp"))]
    return [list(grid.coordinates(5).values()), *rows]


def refused(*lines: str) -> list[float]:
    """Return the numbers of the message that refuses a table of a user, given by its lines."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", prefix="table") as file:
        file.write("\n".join(lines))
        file.flush()
        try:
            play(Request(file.name))
        except ScheduleError as error:
            return numbers(str(error).splitlines()[0].split(": ", 2)[2])
    raise ValueError(f"{lines} is accepted")


def needed(pattern: str) -> str:
    """Return the version in the first group of a pattern in setup.cfg."""
    (version,) = re.findall(pattern, (ROOT / "setup.cfg").read_text())
    return str(version)

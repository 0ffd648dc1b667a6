"""Communication: what each collective sends, over one level and two; links of networks; times by a model."""

import json
from collections.abc import Sequence

from measuring.bars import stacked
from measuring.report import Report
from measuring.worked import Worked, table

TREELESS = "goes in one level"


def compute(report: Report) -> None:
    layout = "--set parallel.zero=1 --set batch.global=4 --set comm.node_ranks=2"
    report.program(f"mpitrain program docs/course/small.toml --ranks 4 --rank 0 {layout} --traffic")
    found = json.loads(report.run("python docs/course/measuring/networks.py"))
    _links(report, found["links"])
    report.commands.append("python docs/course/measuring/networks.py")
    _times(report, found["times"])
    if report.slow:
        counted = json.loads(report.run("mpirun -n 4 python docs/course/measuring/collectives.py"))
        _collectives(report, counted)
    _worked(report)


def _worked(report: Report) -> None:
    """An all-reduce of 1 KiB and of 256 MiB over 64 ranks, 8 on a node: microseconds."""
    times = json.loads(report.run("python docs/course/measuring/networks.py"))["times"]
    of = {(size, name): round(microseconds) for size, name, microseconds in times}
    values = {"far": 14, "near": 3.4, "x": 50_000, "y": 450_000}
    ring = "2*(8*far + 56*near) + 2*n*63/64 / x"
    tree = "2*(3*far + 3*near) + 2*n*(3/x + 3/y)"
    two = "2*(7*near + n*7/8 / y) + 2*(7*far + n/8*7/8 / x)"
    formulas = {"one ring": ring, "binary tree": tree, "two levels": two}
    rows = [
        Worked(f"{name}, {size:,} bytes", formula, {**values, "n": size}, of[size, name])
        for size in (1 << 10, 1 << 28)
        for name, formula in formulas.items()
    ]
    table(report, rows)


def _collectives(report: Report, counted: Sequence[Sequence]) -> None:
    """One row an operation: its bytes on one node, and on two nodes of two ranks."""
    on_one = {name: rest for name, ranks, *rest in counted if ranks == 4}
    on_two = {name: rest for name, ranks, *rest in counted if ranks == 2}
    rows = []
    for name, (size, sent, messages, _) in on_one.items():
        across = on_two[name][3] or TREELESS
        rows.append([name, size, sent, f"{sent / size:.2f}", messages, across])
    head = ["operation", "bytes of the buffer", "sent by rank 0", "of the buffer", "messages"]
    report.table([*head, "on two nodes: bytes of rank 0 that leave its node"], rows, computed=True)


def _links(report: Report, links: Sequence[Sequence]) -> None:
    networks = list(dict.fromkeys(network for _, network, *_ in links))
    patterns = list(dict.fromkeys(pattern for pattern, *_ in links))
    load = {(pattern, network): most for pattern, network, most, _ in links}
    rows = [[pattern, *(f"{load[pattern, network]:.2f}" for network in networks)] for pattern in patterns]
    note = (
        "Counted over all links of a network of 16 nodes: an all-reduce or an all-to-all of a buffer of N "
        "bytes on each node. A number is what the busiest link carries in one direction, as a multiple of N."
    )
    report.table(["busiest link, of N", *networks], rows, name="links", note=note, computed=True)
    bars = {f"{pattern}, {network}": {network: load[pattern, network]} for pattern, network in load}
    report.picture("links", stacked("What the busiest link carries", "N", bars))


def _times(report: Report, times: Sequence[Sequence]) -> None:
    names = list(dict.fromkeys(name for _, name, _ in times))
    sizes = list(dict.fromkeys(size for size, *_ in times))
    of = {(size, name): microseconds for size, name, microseconds in times}
    rows = [[size, *(f"{of[size, name]:,.0f}" for name in names)] for size in sizes]
    note = (
        "Computed by the alpha-beta model, not measured: 64 ranks, 8 on a node. A hop in a node takes 3.4 "
        "microseconds at 450 GB/s (NVLink 4), one between nodes 14 microseconds at 50 GB/s (InfiniBand "
        "NDR). Latencies are those of NCCL's src/graph/tuning.cc."
    )
    report.table(
        ["bytes", *(f"{name}, microseconds" for name in names)], rows, name="times", note=note, computed=True
    )

"""Context parallelism: four ways to attend over a divided sequence, their bytes and their balance."""

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import furthest, megabytes, train
from mpitrain.plan.division.sequence import OF_KIND, SequencePlacement

SHAPE = {"data.sequence": 512, "batch.global": 2, "model.kv_heads": 4, "comm.transport": "messages"}


def compute(report: Report) -> None:
    keys = "--set parallel.cp=4 --set data.sequence=512 --set batch.global=2"
    report.program(f"mpitrain program docs/course/small.toml --ranks 4 --rank 0 {keys} --traffic")
    bars = {}
    for kind in ("plain", "zigzag"):
        placement = SequencePlacement(kind, 512, 4)
        bars |= {f"{kind}, rank {rank}": {"pairs": _pairs(placement, rank) / 1000} for rank in range(4)}
    report.picture("balance", stacked("Pairs of query and key that see each other, in thousands", "", bars))


def measure(report: Report) -> None:
    one = train(report, 1, "one", SHAPE)
    rows = [["one rank", 1, "0.000", f"{one.held('activations'):.2f}", "1.00", "0"]]
    for kind in ("ring", "zigzag", "gather", "ulysses"):
        for ranks in (2, 4):
            keys = {**SHAPE, "parallel.cp": ranks, "parallel.context": kind}
            run = train(report, ranks, f"{kind}-{ranks}", keys)
            sent = megabytes(run.sent("cp"))
            load = 1.0 if kind == "ulysses" else _imbalance(kind, ranks)
            held = f"{run.held('activations'):.2f}"
            rows.append([kind, ranks, sent, held, f"{load:.2f}", furthest(run, one)])
    head = ["parallel.context", "ranks", "sent a step and rank, MB", "activations, MB"]
    report.table([*head, "pairs of the busiest rank, of the mean", "losses differ by"], rows)


def _pairs(placement: SequencePlacement, rank: int) -> int:
    """Return how many pairs of a query of this rank and a key of any rank see each other."""
    return sum(int(position) + 1 for position in placement.positions(rank))


def _imbalance(kind: str, ranks: int) -> float:
    placement = SequencePlacement(OF_KIND[kind], 512, ranks)
    work = [_pairs(placement, rank) for rank in range(ranks)]
    return max(work) * ranks / sum(work)

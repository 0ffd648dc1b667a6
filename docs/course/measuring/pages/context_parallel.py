"""Context parallelism: four ways to attend over a divided sequence, their bytes and their balance."""

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import furthest, megabytes, train
from measuring.tiles import drawn
from measuring.worked import Worked, sent, table
from mpitrain.plan.division.sequence import OF_KIND, SequencePlacement

SHAPE = {"data.sequence": 512, "batch.global": 2, "model.kv_heads": 4, "comm.transport": "messages"}
LAYOUT = "--set parallel.cp=4 --set data.sequence=512 --set batch.global=2"


def compute(report: Report) -> None:
    report.program(f"mpitrain program docs/course/small.toml --ranks 4 --rank 0 {LAYOUT} --traffic")
    bars = {}
    for kind in ("plain", "zigzag"):
        placement = SequencePlacement(kind, 512, 4)
        bars |= {f"{kind}, rank {rank}": {"pairs": _pairs(placement, rank) / 1000} for rank in range(4)}
    picture = drawn(
        "Zigzag on four ranks: who computes which tile, and when", SequencePlacement("zigzag", 512, 4)
    )
    report.picture("tiles", picture)
    report.picture("balance", stacked("Pairs of query and key that see each other, in thousands", "", bars))
    _worked(report)


def _worked(report: Report) -> None:
    """Bytes of each kind: 8 blocks, 2 microbatches, 512 tokens, 2 key-value heads of width 32, fp32."""
    values = {"L": 8, "m": 2, "c": 4, "s": 512, "K": 2, "H": 4, "C": 32, "w": 4}
    formulas = {
        "zigzag": "L*m * 3 * (c-1) * 2*K * s/c * C*w / 10**6",
        "gather": "L*m * 2 * 2*K * s * C*w * (c-1)/c / 10**6",
        "ulysses": "L*m * 2 * (2*H + 2*max(K, c)) * s/c * C*w * (c-1)/c / 10**6",
    }
    rows = []
    for kind, formula in formulas.items():
        keys = f"{LAYOUT} --set parallel.context={kind}"
        printed = report.run(f"mpitrain program docs/course/small.toml --ranks 4 --rank 0 {keys} --traffic")
        moved = sent(printed, "cp", "shift", "all_gather", "reduce_scatter", "all_to_all")
        rows.append(Worked(f"{kind}, MB a step and rank", formula, values, round(moved, 3)))
    rows.append(
        Worked("ring's most loaded rank, of the mean", "(2*c - 1) / c", values, _imbalance("ring", 4))
    )
    table(report, rows)


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

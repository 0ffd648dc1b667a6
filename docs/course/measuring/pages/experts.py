"""Experts: what expert parallelism divides and sends, and what the wire and the capacity change."""

from measuring.bars import stacked
from measuring.report import Report
from measuring.runs import Run, furthest, megabytes, train
from measuring.worked import Worked, sent, table

MIXTRAL = {"model.family": "mixtral", "model.layers": 4, "comm.transport": "messages"}
LAYOUTS = {
    "ep = 1": (1, {}),
    "ep = 2": (2, {"parallel.ep": 2}),
    "ep = 4": (4, {"parallel.ep": 4}),
    "ep = 4, wire bf16": (4, {"parallel.ep": 4, "experts.wire": "bf16"}),
    "ep = 4, wire fp8": (4, {"parallel.ep": 4, "experts.wire": "fp8"}),
    "ep = 4, nodes of 2": (4, {"parallel.ep": 4, "comm.node_ranks": 2}),
    "ep = 4, capacity 1": (4, {"parallel.ep": 4, "experts.capacity": 1}),
}


def compute(report: Report) -> None:
    keys = "--set model.family=mixtral --set model.layers=4 --set parallel.ep=4"
    report.program(f"mpitrain program docs/course/small.toml --ranks 4 --rank 0 {keys} --traffic")
    _worked(report)


def _worked(report: Report) -> None:
    """Rows that a rank sends, and how its messages change with the ranks of ep."""
    rows, bars = [], {}
    for ranks in (2, 4, 8):
        keys = f"--set model.family=mixtral --set model.layers=4 --set parallel.ep={ranks}"
        command = f"mpitrain program docs/course/small.toml --ranks {ranks} --rank 0 {keys} --traffic"
        printed = report.run(command)
        values = {"L": 4, "m": 8 // ranks, "T": 128, "K": 2, "h": 128, "w": 4, "e": ranks}
        formula = "L*m * 4 * T*K*h*w * (e-1)/e / 10**6"
        moved = sent(printed, "experts", "all_to_all_v")
        rows.append(Worked(f"sent with ep = {ranks}, MB a step and rank", formula, values, moved))
        message = Worked("", "T*K*h*w / e / 1000", values)
        bars[f"ep = {ranks}: {ranks - 1} of"] = {"bytes of one message": message.result}
    for ranks in (16, 64):
        message = Worked("KB of a message", "T*K*h*w / e / 1000", {**values, "e": ranks})
        bars[f"ep = {ranks}: {ranks - 1} of"] = {"bytes of one message": message.result}
    rows.append(Worked(f"KB of a message, ep = {ranks}", message.formula, message.values))
    table(report, rows)
    report.picture(
        "messages", stacked("Messages that a rank sends in one exchange: more, each smaller", "KB", bars)
    )


def measure(report: Report) -> None:
    runs = {}
    for name, (ranks, layout) in LAYOUTS.items():
        place = "-".join(name.replace("=", "").replace(",", "").split())
        runs[name] = train(report, ranks, place, {**MIXTRAL, **layout})
    rows = [_row(name, run, runs["ep = 1"]) for name, run in runs.items()]
    head = ["layout", "weights, MB", "moments, MB", "activations, MB"]
    head += ["rows sent a step by rank 0, MB", "of them between nodes", "rows dropped", "losses differ by"]
    note = "Bytes are of the second step on rank 0: how many rows an expert gets changes from step to step."
    report.table(head, rows, note=note)
    report.picture("loads", (runs["ep = 1"].folder / "loads.svg").read_text())


def _row(name: str, run: Run, one: Run) -> list[object]:
    sent = {axis: usage["bytes"] for axis, usage in run.metrics[1]["comm"].items()}
    axes = [axis for axis in sent if axis.startswith("experts")]
    held = [f"{run.held(kind):.2f}" for kind in ("weights", "moments", "activations")]
    far = megabytes(sent["experts_far"]) if "experts_far" in sent else ""
    dropped = round(run.metrics[1]["dropped"])
    return [name, *held, megabytes(sum(sent[axis] for axis in axes)), far, dropped, furthest(run, one)]

"""How much of the exchange of experts is hidden.

The share of its time in flight during which ranks did something else.

    python benchmarks/exchange.py --hosts netns.sh [--steps 4]  on two hosts: as root, after
                                                                `netns.sh setup 1gbit`
    python benchmarks/exchange.py                               on this one

Two ranks with half of 8 experts each (2 of them active), 2 blocks of width 256, ffn 512, 24
sequences of 256 tokens a step in microbatches of 2; one row for each expert, then by nodes of one
rank. `--hosts` is a script that starts a command on a rank of each of two hosts (`netns.sh mpi
COMMAND...`). Shares are of rank 0, from `comm` in metrics.jsonl, without the first step. Waiting
for a rank that is late counts as not hidden: with fewer cores than ranks, or busy ones, shares are
lower.

Two hosts at 1 Gbit/s, emulated on two cores, --steps 3:

    1f1b                  33%
    dualpipev             72%
    dualpipev, by nodes   80%

Beside other programs (load 12 to 20), mean of both ranks and a pair of runs: 1f1b 26%, dualpipev 54
and 58%, by nodes 59 and 57%; when walks took turns at every item, and not at what they start
(parallel/walk.py), dualpipev 48%. With pp=2, 4 blocks and four ranks on the two cores, every other
rank on the same host: 20%, 47%, 48%.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SIZES = (
    "model.family=mixtral", "model.width=256", "model.heads=4", "model.kv_heads=2", "model.ffn=512",
    "model.layers=2", "experts.count=8",
    "data.sequence=256", "batch.micro=2", "batch.global=24", "parallel.pp=1", "parallel.ep=2",
    "run.eval_every=0", "run.eval_batches=1",
    "run.save_every=0", "run.threads=1",
)  # fmt: skip
CASES = {
    "1f1b": ("pipeline.schedule=1f1b", "experts.dispatch=flat"),
    "dualpipev": ("pipeline.schedule=dualpipev", "experts.dispatch=flat"),
    "dualpipev, by nodes": (
        "pipeline.schedule=dualpipev",
        "experts.dispatch=hierarchical",
        "comm.node_ranks=1",
    ),
}
MPITRAIN = str(Path(sys.executable).with_name("mpitrain"))


def hidden(lines: list[dict]) -> float:
    """Return the share of all axes of experts together."""
    used = [
        usage
        for line in lines
        for name, usage in line["comm"].items()
        if name in ("experts", "experts_near", "experts_far")
    ]
    overlapped = sum(usage["overlapped_s"] for usage in used)
    return overlapped / (overlapped + sum(usage["blocked_s"] for usage in used))


def measured(launcher: list[str], keys: tuple[str, ...], steps: int) -> float:
    """Run a case and return its share."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            word
            for key in (*SIZES, *keys, f"run.steps={steps}", f"run.dir={folder}/run")
            for word in ("--set", key)
        ]
        subprocess.run([*launcher, MPITRAIN, "run", *settings], check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
    return hidden([line for line in lines if line["step"] > 1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--hosts", metavar="SCRIPT", help="starts a command on two hosts; without it both ranks are here"
    )
    parser.add_argument("--steps", type=int, default=4, help="at least 2")
    options = parser.parse_args()
    launcher = (
        [options.hosts, "mpi"] if options.hosts else [str(Path(MPITRAIN).with_name("mpirun")), "-n", "2"]
    )
    for name, keys in CASES.items():
        print(f"{name:<22}{measured(launcher, keys, options.steps):.0%}", flush=True)


if __name__ == "__main__":
    main()

"""Train one model in 18 layouts and compare the losses, bit by bit: the tables of docs/same-bits.md.

    python docs/building/same_bits.py [--precision fp32] [--steps 100] [--only tp]

Each layout is a run of its own from the same seed, on at most 4 ranks; all take some minutes on 2 cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

BIN = Path(sys.executable).parent
MODEL = (
    "model.family=mixtral", "model.layers=4", "model.width=32", "model.heads=4", "model.kv_heads=2",
    "model.ffn=64", "experts.count=4", "experts.active=2", "data.sequence=32", "batch.global=8",
    "batch.micro=1", "run.eval_every=0", "run.eval_batches=1", "run.save_every=0", "comm.slow_after=0",
    "optimizer.lr=1e-3",
)  # fmt: skip
TREE = ("numerics.reproducible=layout", "parallel.reduce=step")
LAYOUTS = {
    "one rank": (1, ()),
    "dp=2, zero=0": (2, ("parallel.dp=2", "parallel.zero=0")),
    "dp=2, zero=1": (2, ("parallel.dp=2", "parallel.zero=1")),
    "dp=2, zero=2, reduce=step": (2, ("parallel.dp=2", "parallel.zero=2", "parallel.reduce=step")),
    "dp=2, zero=3, reduce=step": (2, ("parallel.dp=2", "parallel.zero=3", "parallel.reduce=step")),
    "dp=4, zero=1": (4, ("parallel.dp=4", "parallel.zero=1")),
    "dp=4, zero=3, dp_shard=2, reduce=step": (
        4, ("parallel.dp=4", "parallel.zero=3", "parallel.dp_shard=2", "parallel.reduce=step"),
    ),
    'one rank, reproducible="layout"': (1, TREE),
    'dp=4, reproducible="layout"': (4, ("parallel.dp=4", *TREE)),
    "tp=2": (2, ("parallel.tp=2",)),
    "cp=2, zigzag": (2, ("parallel.cp=2",)),
    "cp=2, ulysses": (2, ("parallel.cp=2", "parallel.context=ulysses")),
    "pp=2, 1f1b": (2, ("parallel.pp=2",)),
    "pp=4, zb-h1": (4, ("parallel.pp=4", "pipeline.schedule=zb-h1")),
    "pp=2, zbv": (2, ("parallel.pp=2", "pipeline.schedule=zbv")),
    "ep=2": (2, ("parallel.dp=2", "parallel.ep=2")),
    "ep=4": (4, ("parallel.dp=4", "parallel.ep=4")),
    "tp=2, pp=2": (4, ("parallel.tp=2", "parallel.pp=2")),
}  # fmt: skip


class Result(NamedTuple):
    """loss: of the last step.  digest: of all weights and moments, whatever layout wrote them."""

    loss: float
    digest: str


def train(num_ranks: int, overrides: tuple[str, ...], folder: Path) -> Result:
    """Train in one layout. Raises CalledProcessError with what the run has printed."""
    keys = [f"--set={each}" for each in (*MODEL, *overrides, f"run.dir={folder}")]
    tokens = f"--set=data.tokens={folder.parent / 'tokens'}"
    command = [BIN / "mpirun", "-n", str(num_ranks), BIN / "mpitrain", "run", *keys, tokens]
    subprocess.run(command, check=True, capture_output=True, text=True)
    inspect = [BIN / "mpitrain", "ckpt", "inspect", str(folder), "--json"]
    found = json.loads(subprocess.run(inspect, check=True, capture_output=True, text=True).stdout)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return Result(json.loads(lines[-1])["loss"], digest_in(found))


def digest_in(found: dict) -> str:
    """Return the root digest of the newest step that `ckpt inspect --json` has found."""
    return found["steps"][-1]["digest"]


def table(results: dict[str, Result]) -> str:
    """Return the results in Markdown, each beside the first layout with the same bits."""
    first = next(iter(results.values()))
    lines = ["| layout | loss | difference | digest | same bits as |", "|---|---|---|---|---|"]
    seen: dict[str, str] = {}
    for name, result in results.items():
        same = seen.setdefault(result.digest, name)
        difference = f"{result.loss - first.loss:+.1e}" if result.loss != first.loss else "0"
        row = name, f"{result.loss:.12f}", difference, result.digest[:8], same if same != name else ""
        lines.append("| " + " | ".join(row) + " |")
    losses = [result.loss for result in results.values()]
    return "\n".join([*lines, f"| spread |  | {max(losses) - min(losses):.1e} |  |  |"])


def main() -> None:
    """Train in all layouts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--only", default="", help="part of a layout's name")
    asked = parser.parse_args()
    always = (f"precision.compute={asked.precision}", f"run.steps={asked.steps}")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (num_ranks, overrides)) in enumerate(LAYOUTS.items()):
            if asked.only in name:
                results[name] = train(num_ranks, (*always, *overrides), Path(folder) / str(number))
    print(table(results))


if __name__ == "__main__":
    main()

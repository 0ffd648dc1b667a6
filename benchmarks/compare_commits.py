"""Compare what two checkouts compute: the loss lines of 20 small runs, bit for bit.

    python benchmarks/compare_commits.py OTHER          another checkout of this repository
    python benchmarks/compare_commits.py OTHER zero pp  only runs with such a word in their settings

Each axis, ZeRO stage, kind of schedule and precision, experts, offloading, recomputation, documents. Runs
under the MPI of the environment that is active. A commit before data.order existed reads in sorted order;
its runs are compared with sorted ones.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = (
    "model.layers=4 model.width=32 model.heads=4 model.kv_heads=2 model.ffn=64 data.source=text "
    "data.sequence=32 batch.global=8 run.steps=6 run.eval_every=3 run.save_every=0"
)
MIXTRAL = "model.family=mixtral experts.count=4 experts.width=32"
RUNS = {  # settings: ranks
    "parallel.dp=1": 1,
    "parallel.dp=2 parallel.zero=0": 2,
    "parallel.dp=2 parallel.zero=1": 2,
    "parallel.dp=2 parallel.zero=2": 2,
    "parallel.dp=4 parallel.zero=3 parallel.dp_shard=2": 4,
    "parallel.tp=2": 2,
    "parallel.tp=2 parallel.async_tp=true": 2,
    "parallel.cp=2 parallel.context=zigzag": 2,
    "parallel.cp=2 parallel.context=ulysses": 2,
    "parallel.pp=2 pipeline.schedule=1f1b": 2,
    "parallel.pp=2 pipeline.schedule=gpipe": 2,
    "parallel.pp=2 pipeline.schedule=zbv": 2,
    "parallel.pp=2 pipeline.schedule=interleaved": 2,
    "parallel.pp=2 pipeline.schedule=dualpipe": 2,
    "parallel.pp=2 parallel.dp=2 parallel.zero=1 precision.compute=bf16": 4,
    "precision.compute=fp16": 1,
    "precision.compute=fp8": 1,
    f"{MIXTRAL} parallel.ep=2": 2,
    "memory.recompute=full": 1,
    "memory.offload=activations data.documents=separate": 1,
}
KEYS = ("step", "loss", "grad_norm", "val_loss", "lr")


def lines(tree: Path, settings: str, ranks: int, run_dir: Path, more: list[str]) -> list[str]:
    """Return what a run of a checkout computed, a text a step. Raises SystemExit if it fails."""
    words = [*BASE.split(), *settings.split(), *more, f"run.dir={run_dir}", f"data.path={ROOT / 'LICENSE'}"]
    command = ["mpirun", "-n", str(ranks), sys.executable, "-m", "mpitrain", "run"]
    command += [part for word in words for part in ("--set", word)]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=run_dir.parent, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{tree}: {settings}: exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    found = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [repr({key: line[key] for key in KEYS if key in line}) for line in found]


def has_order(tree: Path) -> bool:
    return "\n    order:" in (tree / "mpitrain" / "config.py").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("words", nargs="*")
    given = parser.parse_args()
    trees = [given.other.resolve(), ROOT]
    wrong = 0
    for settings, ranks in RUNS.items():
        if given.words and not any(word in settings for word in given.words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = [
                lines(tree, settings, ranks, Path(folder, str(i)), ["data.order=sorted"] * has_order(tree))
                for i, tree in enumerate(trees)
            ]
        differing = [pair for pair in zip(*found, strict=True) if pair[0] != pair[1]]
        wrong += bool(differing)
        print(f"{'differs' if differing else 'same   '}  {ranks} ranks  {settings}", flush=True)
        for pair in differing[:1]:
            print(*pair, sep="\n")
    print(f"{wrong} differ")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

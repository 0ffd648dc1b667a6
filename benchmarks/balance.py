"""How well each way of balancing works.

The coefficient of variation of experts' loads on the quickstart corpus, over 60 steps.

    python benchmarks/balance.py [--steps 60] [--ranks 2] [--set KEY=VALUE ...]

A mixtral of the quickstart's width: 4 blocks of 8 experts, of which a token meets 2. The figure is
`load_cv` of metrics.jsonl, the loads of a whole step, a mean over blocks; here a mean over the last
5 steps too, and beside it that of the worst of them.

                step 1  middle  last 5   worst  val loss
    none          0.58    0.99    1.03    1.07     2.302
    microbatch    0.58    0.63    0.26    0.28     2.300
    sequence      0.58    0.63    0.26    0.28     2.300
    global        0.58    0.54    0.34    0.35     2.312
    bias          0.58    0.85    0.65    0.70     2.295
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = ("model.family=mixtral", "model.layers=4", "run.save_every=0", "run.eval_batches=1")
CASES = {
    "none": ("experts.balance=none",),
    "microbatch": ("experts.balance=microbatch",),
    "sequence": ("experts.balance=sequence",),
    "global": ("experts.balance=global",),
    "bias": ("experts.balance=bias", "experts.balance_weight=0"),
}
HERE = Path(sys.executable).parent
LAST = 5


def lines_of(ranks: int, keys: tuple[str, ...]) -> list[dict]:
    """Run, and return what the run said of each step."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [word for key in (*MODEL, *keys, f"run.dir={folder}/run") for word in ("--set", key)]
        subprocess.run(
            [HERE / "mpirun", "-n", str(ranks), HERE / "mpitrain", "run", *settings],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="at least 5")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all runs")
    options = parser.parse_args()
    print(f"{'':<12}{'step 1':>8}{'middle':>8}{'last 5':>8}{'worst':>8}{'val loss':>10}")
    for name, keys in CASES.items():
        steps = f"run.steps={options.steps}", f"run.eval_every={options.steps}"
        lines = lines_of(options.ranks, (*keys, *steps, *options.set))
        found = [line["load_cv"] for line in lines if line["step"]]
        last = found[-LAST:]
        print(
            f"{name:<12}{found[0]:>8.2f}{found[len(found) // 2]:>8.2f}"
            f"{sum(last) / len(last):>8.2f}{max(last):>8.2f}{lines[-1]['val_loss']:>10.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

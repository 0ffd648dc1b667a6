"""Training speed against torch's own trainers, as ratios within one run.

    python benchmarks/training.py --peer torch_peers.py [--rounds 3] [--launch "mpirun -n {n}"]

The reference model (preset `reference`): 8 blocks, width 384, 6 heads, 2 key-value heads, ffn 1024, vocabulary 4096, untied, 8
sequences of 256 tokens a step in microbatches of 1, fp32, AdamW, clip 1.0, one thread per rank. `--peer` is a script that trains the
same with torch (single, ddp) and prints one JSON line with step_s. The candidates take turns; each round gives one median step time
per candidate, and the table shows the median over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

REFERENCE = ("model.preset=reference", "batch.global=8", "batch.micro=1", "data.sequence=256", "run.eval_every=0", "run.eval_batches=1")
BIN = Path(sys.executable).parent
LAYOUTS = {
    "mpitrain 1 rank": (1, ()),
    "mpitrain dp=2": (2, ("parallel.dp=2",)),
    "mpitrain pp=2 1f1b": (2, ("parallel.pp=2", "pipeline.schedule=1f1b")),
    "mpitrain pp=2 zbv": (2, ("parallel.pp=2", "pipeline.schedule=zbv")),
}
PEERS = ("single", "ddp", "pp_1f1b", "pp_zbv")


def mpitrain(num_ranks: int, settings: tuple[str, ...], steps: int, launch: str) -> float:
    """Return the median step time of a run, without its first three steps."""
    with tempfile.TemporaryDirectory() as folder:
        every = (*REFERENCE, *settings, f"run.steps={steps + 3}", "run.save_every=0", f"run.dir={folder}/run")
        command = [*launch.format(n=num_ranks).split(), str(BIN / "mpitrain"), "run", *(f"--set={setting}" for setting in every)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["step_s"] for line in lines if line["step"] > 3)


def peer(script: str, mode: str, steps: int) -> float:
    """Return the median step time of torch's trainer `mode`."""
    launcher = [sys.executable] if mode == "single" else [str(BIN / "torchrun"), "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEPS": str(steps)}
    result = subprocess.run([*launcher, script, mode], check=True, capture_output=True, text=True, env=environment)
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))["step_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--launch", default=f"{BIN / 'mpirun'} -n {{n}}")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="further settings of every mpitrain run")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for mode in PEERS:
            times.setdefault(f"torch {mode}", []).append(peer(arguments.peer, mode, arguments.steps))
        for name, (num_ranks, settings) in LAYOUTS.items():
            every = (*settings, *arguments.settings)
            times.setdefault(name, []).append(mpitrain(num_ranks, every, arguments.steps, arguments.launch))
        print({name: round(values[-1], 3) for name, values in times.items()}, flush=True)
    step_s = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in step_s.items():
        print(f"| {name} | {seconds:.3f} s a step |")
    one, two = step_s["mpitrain 1 rank"], step_s["mpitrain dp=2"]
    pp, zbv = step_s["mpitrain pp=2 1f1b"], step_s["mpitrain pp=2 zbv"]
    print(f"one rank against torch single   {step_s['torch single'] / one:.3f}")
    print(f"dp=2 against twice one rank     {one / (2 * two):.3f}")
    print(f"dp=2 against torch ddp          {step_s['torch ddp'] / two:.3f}")
    print(f"pp=2 against torch pp_1f1b      {step_s['torch pp_1f1b'] / pp:.3f}")
    print(f"zbv against torch pp_zbv        {step_s['torch pp_zbv'] / zbv:.3f}")
    print(f"zbv against half of one rank    {one / 2 / zbv:.3f}")
    print(f"pp=2 against half of one rank + bubble of 1/8, even stages   {one / 2 * (1 + 1 / 8) / pp:.3f}")


if __name__ == "__main__":
    main()

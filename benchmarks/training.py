"""Training speed against torch's own trainers, as ratios within one run.

    python benchmarks/training.py --peer torch_peers.py [--rounds 3] [--only PART_OF_A_NAME]...
    python benchmarks/training.py --hosts netns.sh --only dp=2 --only ddp      on two hosts: as
        root, after `netns.sh setup 1gbit`

The reference model (preset `reference`): 8 blocks, width 384, 6 heads, 2 key-value heads, ffn 1024,
vocabulary 4096, untied, 8 sequences of 256 tokens a step in microbatches of 1, fp32, AdamW, clip
1.0, one thread per rank. Two jobs of one rank at once have nothing to say to one another: what they
leave of twice the speed of one is what any layout of two ranks can have.

`--peer` is a script that trains the same with torch and prints one JSON line with step_s. `--hosts`
is a script that starts a command on a rank of each of two hosts (`netns.sh mpi COMMAND...`), and
the trainer of torch likewise (`netns.sh torch MODE`). The candidates take turns; each round gives
one median step time per candidate, and the table shows the median over the rounds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REFERENCE = (
    "model.preset=reference",
    "batch.global=8",
    "batch.micro=1",
    "data.sequence=256",
    "run.eval_every=0",
    "run.eval_batches=1",
)
LONG = ("data.sequence=2048", "batch.global=2")
BF16 = ("precision.compute=bf16",)
BIN = Path(sys.executable).parent
LAYOUTS = {
    "mpitrain 1 rank": (1, ()),
    "mpitrain 1 rank, two jobs at once": (1, ()),
    "mpitrain 1 rank compiled": (1, ("run.compile=true",)),
    "mpitrain 1 rank bf16": (1, BF16),
    "mpitrain 1 rank bf16 compiled": (1, (*BF16, "run.compile=true")),
    "mpitrain dp=2": (2, ("parallel.dp=2",)),  # ZeRO-1, the default
    "mpitrain dp=2 bf16": (2, ("parallel.dp=2", *BF16)),
    "mpitrain dp=2 bf16 compiled": (2, ("parallel.dp=2", *BF16, "run.compile=true")),
    "mpitrain dp=2 zero=0": (2, ("parallel.dp=2", "parallel.zero=0")),
    # gradients reduced after each microbatch, the default
    "mpitrain dp=2 zero=3": (2, ("parallel.dp=2", "parallel.zero=3")),
    "mpitrain dp=2 zero=3 reduced once": (2, ("parallel.dp=2", "parallel.zero=3", "parallel.reduce=step")),
    "mpitrain dp=2 zero=3 once a step": (
        2,
        ("parallel.dp=2", "parallel.zero=3", "parallel.gather=step", "parallel.reduce=step"),
    ),
    "mpitrain pp=2 1f1b": (2, ("parallel.pp=2", "pipeline.schedule=1f1b")),
    "mpitrain pp=2 zbv": (2, ("parallel.pp=2", "pipeline.schedule=zbv")),
    "mpitrain tp=2": (2, ("parallel.tp=2",)),
    "mpitrain tp=2 async": (2, ("parallel.tp=2", "parallel.async_tp=true")),
    "mpitrain 1 rank, 2048 tokens": (1, LONG),
    "mpitrain cp=2, 2048 tokens": (2, ("parallel.cp=2", *LONG)),
}
PEERS = ("single", "ddp", "zero1", "fsdp2", "pp_1f1b", "pp_zbv", "tp")
AT_ONCE = {"mpitrain 1 rank, two jobs at once": 2}
RATIOS = {  # what: (time of the other, our time, by how much the other is to be divided)
    "what two jobs at once leave of two processors": (
        "mpitrain 1 rank",
        "mpitrain 1 rank, two jobs at once",
        1,
    ),
    "one rank bf16 against one rank": ("mpitrain 1 rank", "mpitrain 1 rank bf16", 1),
    "one rank bf16 against one rank, both compiled": (
        "mpitrain 1 rank compiled",
        "mpitrain 1 rank bf16 compiled",
        1,
    ),
    "dp=2 bf16 against dp=2": ("mpitrain dp=2", "mpitrain dp=2 bf16", 1),
    "one rank against torch single": ("torch single", "mpitrain 1 rank", 1),
    "one rank compiled against one rank": ("mpitrain 1 rank", "mpitrain 1 rank compiled", 1),
    "one rank compiled against torch single": ("torch single", "mpitrain 1 rank compiled", 1),
    "dp=2 against twice one rank": ("mpitrain 1 rank", "mpitrain dp=2", 2),
    "dp=2 against torch ddp": ("torch ddp", "mpitrain dp=2", 1),
    "dp=2 zero=0 against torch ddp": ("torch ddp", "mpitrain dp=2 zero=0", 1),
    "dp=2 against torch zero1": ("torch zero1", "mpitrain dp=2", 1),
    "zero=3 against torch fsdp2": ("torch fsdp2", "mpitrain dp=2 zero=3", 1),
    "zero=3, reduced once a step, against torch fsdp2": (
        "torch fsdp2",
        "mpitrain dp=2 zero=3 reduced once",
        1,
    ),
    "zero=3, gathered once a step, against torch fsdp2": (
        "torch fsdp2",
        "mpitrain dp=2 zero=3 once a step",
        1,
    ),
    "pp=2 1f1b against torch's": ("torch pp_1f1b", "mpitrain pp=2 1f1b", 1),
    "pp=2 1f1b against half of one rank and a bubble of 1/8": (
        "mpitrain 1 rank",
        "mpitrain pp=2 1f1b",
        2 / (1 + 1 / 8),
    ),
    "zbv against torch's": ("torch pp_zbv", "mpitrain pp=2 zbv", 1),
    "zbv against half of one rank": ("mpitrain 1 rank", "mpitrain pp=2 zbv", 2),
    "tp=2 against torch tp": ("torch tp", "mpitrain tp=2", 1),
    "tp=2 against half of one rank": ("mpitrain 1 rank", "mpitrain tp=2", 2),
    "asynchronous tp=2 against tp=2": ("mpitrain tp=2", "mpitrain tp=2 async", 1),
    "cp=2 against half of one rank, 2048 tokens": (
        "mpitrain 1 rank, 2048 tokens",
        "mpitrain cp=2, 2048 tokens",
        2,
    ),
}


def mpitrain(num_ranks: int, settings: tuple[str, ...], steps: int, launch: str) -> float:
    """Return the median step time of a run, without its first three steps."""
    with tempfile.TemporaryDirectory() as folder:
        every = (*REFERENCE, *settings, f"run.steps={steps + 3}", "run.save_every=0", f"run.dir={folder}/run")
        command = [
            *launch.format(n=num_ranks).split(),
            str(BIN / "mpitrain"),
            "run",
            *(f"--set={setting}" for setting in every),
        ]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["step_s"] for line in lines if line["step"] > 3)


def peer(script: str, hosts: str, mode: str, steps: int) -> float:
    """Return the median step time of torch's trainer `mode`."""
    alone = [sys.executable] if mode == "single" else [str(BIN / "torchrun"), "--nproc-per-node", "2"]
    command = ["bash", hosts, "torch", mode] if hosts else [*alone, script, mode]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEPS": str(steps)}
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))["step_s"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peer",
        default="",
        help="torch's trainers; without it, and without --hosts, mpitrain alone is timed",
    )
    parser.add_argument("--hosts", default="", help="a script that starts commands on two hosts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--launch", default=f"{BIN / 'mpirun'} -n {{n}}")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="further settings of every mpitrain run"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        help="candidates whose name has this in it; may be given several times",
    )
    arguments = parser.parse_args()
    launch = f"bash {arguments.hosts} mpi" if arguments.hosts else arguments.launch
    wanted = lambda name: not arguments.only or any(part in name for part in arguments.only)  # noqa: E731
    times: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for mode in filter(
            lambda mode: wanted(f"torch {mode}"), PEERS if arguments.peer or arguments.hosts else ()
        ):
            times.setdefault(f"torch {mode}", []).append(
                peer(arguments.peer, arguments.hosts, mode, arguments.steps)
            )
        for name, (num_ranks, settings) in LAYOUTS.items():
            if wanted(name) and not (arguments.hosts and num_ranks == 1):
                every = (*settings, *arguments.settings)
                with ThreadPoolExecutor() as pool:
                    jobs = [
                        pool.submit(mpitrain, num_ranks, every, arguments.steps, launch)
                        for _ in range(AT_ONCE.get(name, 1))
                    ]
                times.setdefault(name, []).append(max(job.result() for job in jobs))
        print({name: round(values[-1], 3) for name, values in times.items()}, flush=True)
    step_s = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in step_s.items():
        print(f"| {name} | {seconds:.3f} s a step |")
    for what, (other, ours, ranks) in RATIOS.items():
        if other in step_s and ours in step_s:
            print(f"{what:<58} {step_s[other] / ranks / step_s[ours]:.3f}")


if __name__ == "__main__":
    main()

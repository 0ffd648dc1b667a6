"""Speed and memory of ZeRO-3 beside torch's FSDP2 (fully_shard, gloo, CPU), as ratios within one run.

    python benchmarks/fsdp2.py [--rounds 5] [--steps 8] [--ranks 2]

Gradients are reduced after each microbatch (parallel.reduce = "microbatch", set_requires_gradient_sync
always), or once a step ("step"; only with the last microbatch). The reference model, 8 sequences of 256
tokens a step in microbatches of 1, fp32, AdamW, clip 1.0, one thread per rank; blocks are sharded one by
one, and torch drops weights after the forward, as parallel.gather = "use" does.

The four take turns, and the order is turned round in every other round. A step is the median of a run's
steps after the first three, memory the growth of rank 0 over the process before it has a model: what is
resident at most and no file backs. Ratios are of each round's pair; the table shows their medians.

%s
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

BIN = Path(sys.executable).parent
FIRST = 3  # steps that aren't counted
WAYS = ("microbatch", "step")
SEQUENCES = 8
TOKENS = 256
MEASURED = """2026-11-26, Intel Xeon with AMX, two cores, torch 2.13.0, MPICH 5.0.2, `--rounds 3 --steps 3`:

    reduced       FSDP2 s   ours s  as fast  FSDP2 MB  ours MB  of it
    microbatch       1.62     0.87     1.92     556.3    240.9   0.43
    step             1.39     0.85     1.68     551.1    292.5   0.53
"""


class FsdpRun(NamedTuple):
    """Seconds of a step, and bytes by which a process grew."""

    step_s: float
    grown: float


# ---------------------------------------------------------------- torch


def train_torch(way: str, steps: int) -> None:
    """Be a rank of torch's trainer; rank 0 prints what it took."""
    import torch
    from plain_torch import PlainModel
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from mpitrain.cluster.resident import peak_resident, resident
    from mpitrain.config import Model as Sizes

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    size, rank = distributed.get_world_size(), distributed.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    before = resident()
    sizes = Sizes(layers=8, width=384, heads=6, kv_heads=2, ffn=1024, vocab=4096, tied=False)
    model = PlainModel(sizes, 1e4)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    mine = SEQUENCES // size
    times = []
    for step in range(FIRST + steps):
        rows = torch.randint(0, 4096, (SEQUENCES, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        rows = rows[rank * mine : (rank + 1) * mine]
        distributed.barrier()
        begin = time.perf_counter()
        for number, row in enumerate(rows.split(1)):
            model.set_requires_gradient_sync(way == "microbatch" or number == mine - 1)
            (model(row[:, :-1], row[:, 1:]) / mine).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    if rank == 0:
        print(json.dumps([statistics.median(times[FIRST:]), peak_resident() - before]), flush=True)
    distributed.barrier()
    distributed.destroy_process_group()


def torch_gpus(way: str, ranks: int, steps: int) -> FsdpRun:
    command = [str(BIN / "torchrun"), "--nproc-per-node", str(ranks), __file__, "--rank", way]
    output = _output([*command, "--steps", str(steps)])
    return FsdpRun(*json.loads(next(line for line in output.splitlines() if line.startswith("["))))


# ---------------------------------------------------------------- mpitrain


def of_mpitrain(way: str, ranks: int, steps: int) -> FsdpRun:
    from memory import read

    with tempfile.TemporaryDirectory() as folder:
        settings = (
            *("model.preset=reference", f"batch.global={SEQUENCES}", "batch.micro=1"),
            *(f"data.sequence={TOKENS}", "run.eval_every=0", "run.eval_batches=1", "run.preflight=off"),
            *("run.save_every=0", "run.save=blocking", f"run.steps={FIRST + steps}", f"run.dir={folder}/run"),
            *(f"parallel.dp={ranks}", "parallel.zero=3", "parallel.gather=use", f"parallel.reduce={way}"),
        )
        launched = [str(BIN / "mpirun"), "-n", str(ranks), str(BIN / "mpitrain"), "run"]
        output = _output([*launched, *(f"--set={setting}" for setting in settings)])
        lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
    times = [line["step_s"] for line in lines if line.get("step", 0) > FIRST and "step_s" in line]
    return FsdpRun(statistics.median(times), read(output).measured * 1e6)


def _output(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout


# ---------------------------------------------------------------- both


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__ % MEASURED, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        train_torch(arguments.rank, arguments.steps)
        return
    candidates = [(of, way) for way in WAYS for of in (torch_gpus, of_mpitrain)]
    rounds: list[dict] = []
    for number in range(arguments.rounds):
        order = candidates if number % 2 == 0 else candidates[::-1]
        rounds.append({(of, way): of(way, arguments.ranks, arguments.steps) for of, way in order})
    print(f"{date.today()}, {os.cpu_count()} cores, {arguments.ranks} ranks, {arguments.rounds} rounds")
    print("reduced       FSDP2 s   ours s  as fast  FSDP2 MB  ours MB  of it")
    for way in WAYS:
        pairs = [(each[torch_gpus, way], each[of_mpitrain, way]) for each in rounds]
        medians = [statistics.median(pair[at][kind] for pair in pairs) for kind in (0, 1) for at in (0, 1)]
        faster = statistics.median(theirs.step_s / ours.step_s for theirs, ours in pairs)
        share = statistics.median(ours.grown / theirs.grown for theirs, ours in pairs)
        print(
            f"{way:<12} {medians[0]:>8.2f} {medians[1]:>8.2f} {faster:>8.2f} {medians[2] / 1e6:>9.1f} "
            f"{medians[3] / 1e6:>8.1f} {share:>6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""What saving costs: a step while a checkpoint is written beside one without, the stall, and what
the disk gets.

    python benchmarks/checkpoint.py [RANKS] [SETTING ...]  for example: 2 run.threads=1
                                                           model.layers=4

It trains the model of preset `reference` on 1 rank, saves now and then, and reads metrics.jsonl:

    step    median time of the steps while one is being written, over that of the others of the same
            run; reported is each save's share
    stall   for which training stood still for the copy in host memory, over the time to copy as
            many bytes between two buffers
    disk    bytes a second from the first to the commit, over those of one write and fsync of the
            same bytes, in turns in one process
    verify  bytes a second of what a run does before it resumes from a step, and `mpitrain ckpt
            verify`, of a file that was just written

Steps are timed by the run itself (step_s), and by the clock between their lines, which has the
stall and all else in it.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from mpitrain.checkpoint.save import begin, commit, write_shard
from mpitrain.checkpoint.verify import verify

SETTINGS = [
    "model.preset=reference",
    "batch.global=4",
    "batch.micro=1",
    "data.sequence=128",
    "run.steps=60",
    "run.save_every=15",
]
META = {"tokens": 0, "updates": 0, "skipped": 0, "data": "", "loss_scale": [1.0, 0]}
ROUNDS = 9


def train(folder: Path, num_ranks: int, settings: list[str]) -> list[dict]:
    """Run, and return the lines of metrics.jsonl, each with the time at which it was seen."""
    words = [
        word
        for setting in (*SETTINGS, "run.eval_every=0", f"run.dir={folder}", *settings)
        for word in ("--set", setting)
    ]
    run = subprocess.Popen(
        ["mpirun", "-n", str(num_ranks), "mpitrain", "run", *words], stdout=subprocess.DEVNULL
    )
    path = folder / "metrics.jsonl"
    lines = []
    while run.poll() is None:
        found = path.read_text().splitlines(keepends=True) if path.exists() else []
        lines += [
            json.loads(line) | {"seen": time.perf_counter()}
            for line in found[len(lines) :]
            if line.endswith("\n")
        ]
        time.sleep(0.002)
    if run.returncode:
        sys.exit(f"mpitrain ended with {run.returncode}")
    return [line for line in lines if line["step"] > 2]


def steps(lines: list[dict]) -> None:
    """Compare the steps during a save with the others."""
    saves = [save | {"reported": line["step"]} for line in lines for save in line.get("saves", ())]
    during = {step for save in saves for step in range(save["step"] + 1, save["reported"] + 1)}
    times = {line["step"]: line["step_s"] for line in lines}
    clock = {b["step"]: b["seen"] - a["seen"] for a, b in zip(lines, lines[1:])}
    for name, found in (("step_s", times), ("clock", clock)):
        inside, outside = (
            [s for step, s in found.items() if (step in during) == each] for each in (True, False)
        )
        with_ = statistics.median(inside)
        without = statistics.median(outside)
        print(f"step, by {name}: {with_ * 1e3:.1f} ms while saving ({len(inside)}), {without * 1e3:.1f} ms "
              f"else ({len(outside)}): {with_ / without:.3f}")  # fmt: skip
    print("saves took", ", ".join(f"{save['took_s']:.2f} s" for save in saves))
    print("stalls", ", ".join(f"{save['stall_s'] * 1e3:.1f} ms" for save in saves))


def memcpy_s(num_bytes: int) -> float:
    """Return the time to copy so many bytes from one buffer to another, both in use before."""
    torch.set_num_threads(1)
    a = torch.ones(num_bytes // 4)
    b = torch.zeros(num_bytes // 4)
    times = []
    for _ in range(ROUNDS):
        begin_s = time.perf_counter()
        b.copy_(a)
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times)


def plain(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with open(path, "wb", buffering=0) as file:
        for array in arrays.values():
            file.write(array.reshape(-1).view(np.uint8))
        os.fsync(file.fileno())


def save(folder: Path, step: int, arrays: dict[str, np.ndarray]) -> None:
    tmp = begin(folder, step)
    write_shard(tmp, 0, arrays)
    commit(tmp, META | {"step": step}, 1)


def disk(folder: Path, num_bytes: int, num_arrays: int) -> None:
    """Write as many bytes as a checkpoint, in turns with and without its format."""
    rows = num_bytes // 4 // 1024 // num_arrays
    arrays = {
        f"parameters/{i:04d}": np.random.default_rng(i).standard_normal((rows, 1024), np.float32)
        for i in range(num_arrays)
    }
    total = sum(array.nbytes for array in arrays.values())
    times: dict[str, list[float]] = {"plain": [], "saved": []}
    for _ in range(ROUNDS):
        for name, action in (
            ("plain", lambda: plain(folder / "plain", arrays)),
            ("saved", lambda: save(folder, 1, arrays)),
        ):
            shutil.rmtree(folder / "step-00000001", ignore_errors=True)
            (folder / "plain").unlink(missing_ok=True)
            os.sync()
            begin_s = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - begin_s)
    rates = {name: total / statistics.median(found) / 1e6 for name, found in times.items()}
    print(f"disk, {total / 1e6:.0f} MB in {num_arrays} arrays: {rates['saved']:.0f} MB/s saved, "
          f"{rates['plain']:.0f} MB/s written and synced: {rates['saved'] / rates['plain']:.2f}")  # fmt: skip
    begin_s = time.perf_counter()
    verify(folder / "step-00000001")
    print(f"verified, from memory: {total / (time.perf_counter() - begin_s) / 1e6:.0f} MB/s")


def main() -> None:
    num_ranks = int((sys.argv[1:] or ["1"])[0])
    settings = sys.argv[2:]
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        steps(train(folder / "run", num_ranks, settings))
        checkpoint = next((folder / "run" / "checkpoints").glob("step-*"))
        num_bytes = sum(path.stat().st_size for path in checkpoint.glob("shard-*.h5"))
        print(
            f"copying {num_bytes / num_ranks / 1e6:.0f} MB, the state of a rank: "
            f"{memcpy_s(num_bytes // num_ranks) * 1e3:.1f} ms"
        )
        shutil.rmtree(folder / "run")
        for total in (num_bytes, 10**9):
            disk(folder, total, 200)


if __name__ == "__main__":
    main()

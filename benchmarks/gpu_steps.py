"""Steps of a model on one GPU, in one process: as they are, compiled, the fastest, and plain torch's.

    python benchmarks/gpu_steps.py                          llama3.2-1b, 64 x 2048 tokens a step, bf16
    python benchmarks/gpu_steps.py --profile               and the time of a step, kernel by kernel
    python benchmarks/gpu_steps.py batch.micro=8            any settings; the last of a key counts
    python benchmarks/gpu_steps.py --only compiled precision.compute=fp8
    python benchmarks/gpu_steps.py --device cpu --small     walks through it without a GPU

An Actor takes the steps, so nothing is read, saved or validated between them. Plain torch is
benchmarks/plain_torch.py: bf16 by autocast, compiled blocks, the attention that torch takes (cuDNN's on an
H200), fused AdamW. Prints JSON.
"""

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_models import LARGE, SMALL
from mpi4py import MPI

from mpitrain.actor.actor import Actor
from mpitrain.actor.communicators import build_mesh
from mpitrain.comm.base.world import NULL_REPORTER, World
from mpitrain.config import Config, load
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.settings.resolve import resolve
from mpitrain.training.machine.device_placement import place
from mpitrain.training.machine.peak_flops import data_sheet

FORMS = {  # settings, and whether what lies between products is compiled
    "as they are": ({}, False),
    "compiled": ({}, True),
    "compiled, not deterministic": ({"numerics.deterministic": "false"}, True),
}
REPEATS = 3
MOST_ROWS = 30  # of a profile


def planned(settings: dict[str, object], device: str, given: list[str]) -> Plan:
    words = [f"{key}={value}" for key, value in settings.items()] + [f"run.device={device}", *given]
    return plan_of(resolve(load(None, words), 1, 256))


def timed(step: Callable[[], object], device: str) -> list[float]:
    """Return the seconds of some steps, after one that warms up."""
    found = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found


def pace(plan: Plan, seconds: list[float], device: str) -> dict[str, object]:
    """Return tokens/s, and what share of a data sheet's peak that is."""
    config = plan.config
    tokens = config.batch.global_ * config.data.sequence
    first, *others = seconds
    found = {"first step s": first, "step s": others, "tokens/s": tokens / min(others)}
    if device == "cuda":
        sheet = data_sheet(torch.cuda.get_device_name())
        if sheet:
            found["MFU"] = tokens / min(others) * plan.flops_per_token() / sheet.flops
        found["most GB"] = torch.cuda.max_memory_allocated() / 1e9
    return found


def rows_of(config: Config, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (config.batch.global_, config.data.sequence + 1), device=device)


def ours(plan: Plan, compiled: bool, device: str, profile: bool) -> dict[str, object]:
    """Return how fast an Actor takes steps."""
    where = place(plan, World(MPI.COMM_WORLD, NULL_REPORTER)).device
    mesh = build_mesh(plan, MPI.COMM_WORLD)
    begin = time.perf_counter()
    actor = Actor(plan, mesh, where, compiled=compiled)
    built = time.perf_counter() - begin
    microbatches = actor.cutter.cut(rows_of(plan.config, where))
    numbers = iter(range(1, 100))

    def step() -> None:
        actor.run_step(next(numbers), microbatches, 1e-4)

    found = {"build s": built} | pace(plan, timed(step, device), device)
    if profile:
        found |= {"kernels": kernels_of(step, device), "the host waits": waits_of(step, device)}
    mesh.free()
    return found


def kernels_of(step: Callable[[], None], device: str) -> dict[str, list[float]]:
    """Return milliseconds and calls of what takes longest in a step."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiled:
        step()
    order = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    rows = sorted(profiled.key_averages(), key=lambda row: getattr(row, order), reverse=True)[:MOST_ROWS]
    return {row.key[:120]: [getattr(row, order) / 1e3, row.count] for row in rows}


def waits_of(step: Callable[[], None], device: str) -> dict[str, int]:
    """Return where the host waits for the GPU in a step, and how often."""
    if device != "cuda":
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    places = [
        f"{Path(each.filename).name}:{each.lineno}" for each in caught if "synchroniz" in str(each.message)
    ]
    return {each: places.count(each) for each in sorted(set(places))}


def theirs(plan: Plan, device: str) -> dict[str, object]:
    """Return how fast plain torch takes them."""
    from plain_torch import PlainModel

    config = plan.config
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.autograd.set_multithreading_enabled(True)
    model = PlainModel(config.model, 10_000.0).to(device)
    model.compile_blocks("inductor" if device == "cuda" else "eager")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens = rows_of(config, torch.device(device))

    def step() -> None:
        for rows in tokens.split(config.batch.micro):
            with torch.autocast(device, torch.bfloat16):
                loss = model(rows[:, :-1], rows[:, 1:])
            (loss * len(rows) / config.batch.global_).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return pace(plan, timed(step, device), device)


def measure(device: str, small: bool, only: list[str], given: list[str], profile: bool) -> dict[str, object]:
    """Measure each form; what fails says so in its place."""
    found: dict[str, object] = {}
    for name in only:
        try:
            settings, compiled = FORMS.get(name, ({}, False))
            plan = planned((SMALL if small else LARGE) | settings, device, given)
            run = (
                ours(plan, compiled and device == "cuda", device, profile)
                if name in FORMS
                else theirs(plan, device)
            )
            found[name] = run
        except (RuntimeError, ImportError) as error:
            found[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--profile", action="store_true")
    names = [*FORMS, "plain torch"]
    parser.add_argument("--only", action="append", choices=names, help="may be given several times")
    given = parser.parse_args()
    if not MPI.Is_initialized():
        MPI.Init()
    found = measure(given.device, given.small, given.only or names, given.settings, given.profile)
    MPI.Finalize()
    print(json.dumps(found))


if __name__ == "__main__":
    main()

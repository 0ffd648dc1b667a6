"""A machine with one GPU, for half an hour: what nobody could run before, in the order of what it tells.

    python benchmarks/gpu_first.py                       everything; needs this package and an MPI,
                                                         no network
    python benchmarks/gpu_first.py --only steps staging  some parts; --minutes 10: no part begins
                                                         later
    python benchmarks/gpu_first.py --device cpu --small  walks through all of it without a GPU, on a
                                                         model of no use

    facts    GPU, driver, torch, MPI, what `mpitrain doctor` says of two ranks
    kernels  sums in order equal the CPU's; products into fp32; fp8 products; which attention torch
             takes, and its bits twice
    tests    those marked gpu: in one process, on one rank, on two ranks that share the GPU
    parity   losses of a small model in each layout and precision, beside the CPU's; the same run
             twice; memory predicted and held
    steps    benchmarks/gpu_steps.py: llama3.2-1b, 64 x 2048 tokens, bf16, as they are, compiled, not
             deterministic, and plain torch; where the time of a step goes
    staging  the same on two ranks that share the GPU: what it costs to go through host memory

Each part has a limit, below ten minutes. What it found is printed when it is there, and --out has
everything so far, also of what went wrong; where a command may not last half an hour, take some
parts at a time. docs/guides/gpus.md has what was found on an H200. Without a GPU: `python
tests/hardware/without_gpu/run.py python benchmarks/gpu_first.py --small`, which has no cuDNN and computes
nothing in Triton.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from gpu_models import LARGE, SMALL  # noqa: E402
from launch import MPITRAIN, NO_GPU, WITH_GPU, mpirun, options, tail  # noqa: E402

QUIET = {"run.eval_batches": 1, "run.eval_every": 0, "run.save_every": 0}
# ranks, settings beside those of the quickstart in bf16; compared with the CPU's run on one rank in
# the same precision
PARITY = {
    "one rank": (1, {}),
    "one rank again": (1, {}),
    "zero 1": (2, {"parallel.zero": 1}),
    "zero 3": (2, {"parallel.zero": 3}),
    "pp": (2, {"parallel.pp": 2}),
    "tp": (2, {"parallel.tp": 2}),
    "cp": (2, {"parallel.cp": 2}),
    "fp32, activations offloaded": (1, {"precision.compute": "fp32", "memory.offload": "activations"}),
    "all offloaded": (1, {"memory.offload": "all"}),
    "fp16": (1, {"precision.compute": "fp16"}),
    "fp8": (1, {"precision.compute": "fp8"}),
}


class GpuMachine:
    """What parts are given: how to run something for at most so long, and where."""

    def __init__(self, device: str, small: bool, folder: Path):
        self.device = device
        self.small = small
        self.folder = folder
        self.end = float("inf")
        self.model = SMALL if small else LARGE
        self._runs = 0

    def left(self, most: float) -> float:
        """Return for how long something may run that takes `most` seconds at most."""
        left = min(most, self.end - time.monotonic())
        if left <= 0:
            raise TimeoutError("no time is left for it")
        return left

    def run(
        self, num_ranks: int, settings: dict[str, object], device: str = "", limit: float = 180
    ) -> dict[str, object]:
        """Train; return the steps, and what was said of memory.

        Of a run that fails, the end of what it said.
        """
        self._runs += 1
        where = self.folder / str(self._runs)
        device = device or self.device
        settings = {**QUIET, **settings, "run.dir": where, "run.device": device}
        env = WITH_GPU if device == "cuda" else None
        done = mpirun(num_ranks, MPITRAIN, "run", *options(settings), env=env, timeout=self.left(limit))
        if done.returncode != 0:
            return {"failed": tail(done.output, 12), "code": done.returncode}
        steps = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()][1:]
        lines = [
            line
            for line in done.output.splitlines()
            if line.startswith(("memory of", "torch counted", "device buffers", "MFU"))
        ]
        return {"steps": steps, "told": lines, "wall_s": done.wall_s}

    def child(self, what: str, *words: str, limit: float) -> dict[str, object]:
        """Run a part of this file in a process of its own, which may crash; return the object that
        it prints.
        """
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--child",
            what,
            "--device",
            self.device,
            *words,
        ]
        done = mpirun(
            0, *command, *(["--small"] if self.small else []), env=self._env(), timeout=self.left(limit)
        )
        if done.returncode != 0:
            return {"failed": tail(done.output, 12), "code": done.returncode}
        return json.loads([line for line in done.output.splitlines() if line.startswith("{")][-1])

    def _env(self) -> dict[str, str | None]:
        return WITH_GPU if self.device == "cuda" else NO_GPU

    def said(
        self, *command: str, num_ranks: int = 0, limit: float = 60, lines: int = 20
    ) -> dict[str, object]:
        """Run a command; return its code and the end of what it said."""
        try:
            done = mpirun(num_ranks, *command, env=self._env(), cwd=ROOT, timeout=self.left(limit))
        except OSError as error:
            return {"failed": str(error)}
        return {
            "code": done.returncode,
            "said": tail(done.output, lines).splitlines(),
            "wall_s": round(done.wall_s, 1),
        }


# ---------------------------------------------------------------- parts


def facts(machine, found):
    """Find what the machine is."""
    code = (
        "import torch; print(torch.__version__, torch.version.cuda, torch.version.hip, "
        "torch.backends.cudnn.version(), "
    )
    code += "[torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())])"
    found |= {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": machine.said(sys.executable, "-c", code),
    }
    if machine.device == "cuda":
        found["nvidia-smi"] = machine.said("nvidia-smi")
    found["doctor"] = machine.said(MPITRAIN, "doctor", num_ranks=2)


def kernels(machine, found):
    found |= machine.child("kernels", limit=120)


def tests(machine, found):
    """Find how the tests marked gpu end. Without a GPU two of the same for a CPU."""
    gpu = machine.device == "cuda"
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    chosen = ["-m", "gpu", "tests"] if gpu else ["-k", "cpu and memory", "tests/hardware/test_gpu_steps.py"]
    if gpu:
        found["one process"] = machine.said(*pytest, *chosen, limit=120)
    for num_ranks in (1, 2) if gpu else (2,):
        found[f"{num_ranks} ranks"] = machine.said(
            *pytest, "--only-mpi", *chosen, num_ranks=num_ranks, limit=150
        )


def parity(machine, found):
    """Find, for each layout and precision, how far its losses are from the CPU's, and its memory."""
    common = {
        **(SMALL if machine.small else {}),
        "precision.compute": "bf16",
        "run.steps": 3 if machine.small else 20,
    }
    expected: dict[str, dict] = {}
    chosen = (
        {name: PARITY[name] for name in ("one rank", "one rank again", "tp")} if machine.small else PARITY
    )
    for name, (num_ranks, settings) in chosen.items():
        precision = settings.get("precision.compute", "bf16")
        if precision not in expected:
            expected[precision] = machine.run(
                1, {**common, "precision.compute": precision}, device="cpu", limit=90
            )
        found[name] = compared(machine.run(num_ranks, {**common, **settings}, limit=90), expected[precision])
        print(f"    {name}: {found[name]}", flush=True)
        if name == "one rank again":
            first, second = (found[each].get("losses") for each in ("one rank", name))
            found["the same bits twice"] = first is not None and first == second


def compared(run, expected):
    """Return the largest relative difference of losses to another run's."""
    if "failed" in run or "failed" in expected:
        return run if "failed" in run else {"the CPU's failed": expected["failed"]}
    losses, other = ([step["loss"] for step in each["steps"]] for each in (run, expected))
    off = max(abs(a / b - 1) for a, b in zip(losses, other))
    return {"largest difference of a loss": off, "losses": losses, "told": run["told"]}


def steps(machine, found):
    """Find tokens/s and MFU of mpitrain and of plain torch, and where the time goes."""
    found |= machine.child("steps", limit=420)


def pace(run):
    """Return tokens/s and MFU of the steps after the second, a median, and what was said of memory."""
    if "failed" in run:
        return run
    steps = run["steps"][2:]
    return {
        key: statistics.median(step[key] for step in steps) for key in ("tokens_per_s", "mfu", "step_s")
    } | {"told": run["told"]}


def staging(machine, found):
    """Find tokens/s on one rank and on two that share the GPU, and what communication cost."""
    steps = {"run.steps": 3 if machine.small else 5}
    for name, num_ranks, settings in (
        ("1 rank", 1, {}),
        ("2 ranks", 2, {}),
        ("2 ranks, messages", 2, {"comm.transport": "messages"}),
    ):
        run = machine.run(num_ranks, {**machine.model, **steps, **settings, "batch.micro": 2}, limit=150)
        found[name] = pace(run) | ({"comm": run["steps"][-1]["comm"]} if "steps" in run else {})
        print(f"    {name}: {found[name]}", flush=True)


PARTS = {  # what, and for how many seconds at most
    "facts": (facts, 120), "kernels": (kernels, 120), "tests": (tests, 330), "parity": (parity, 420),
    "steps": (steps, 420), "staging": (staging, 300),
}  # fmt: skip


# ----------------------------------------------------- children: what may crash, or has to be alone


def child_kernels(device, small):
    """Compare kernels with the CPU's, and attention with itself."""
    import torch

    from mpitrain.comm.base.buffers import sum_in_order
    from mpitrain.config import Numerics
    from mpitrain.training.machine.determinism import settle

    found = {}
    length = 1 << (16 if small else 24)
    for num in (2, 3, 8):
        parts = [torch.randn(length, generator=torch.Generator().manual_seed(i)) for i in range(num)]
        there = [part.to(device) for part in parts]
        out = torch.empty(length, device=device)
        sum_in_order(parts, expected := torch.empty(length))
        seconds = timed(lambda there=there, out=out: sum_in_order(there, out), device)
        found[f"sum of {num}"] = {
            "equal": torch.equal(out.cpu(), expected),
            "GB/s": (num + 1) * out.nbytes / seconds / 1e9,
        }
    a = torch.randn(256, 256, device=device).bfloat16()
    found["product into fp32"] = attempt(lambda: str(torch.mm(a, a, out_dtype=torch.float32).dtype))
    one = torch.ones((), device=device)
    e5m2 = a.to(torch.float8_e5m2)
    e4m3 = a.to(torch.float8_e4m3fn).t()
    found["fp8 product"] = attempt(
        lambda: str(torch._scaled_mm(e5m2, e4m3, one, one, out_dtype=torch.float32).dtype)
    )
    for deterministic in (True, False):
        if device == "cuda":
            settle(Numerics(deterministic=deterministic))
        found[f"attention, deterministic={deterministic}"] = attempt(
            lambda: attention_twice(device, 64 if small else 2048)
        )
    return found


def attempt(function):
    try:
        return function()
    except Exception as error:  # what a GPU, or this torch, can't do
        return f"{type(error).__name__}: {str(error)[:200]}"


def timed(function, device, times=5):
    """Return the seconds that a call takes on the device, the least of several."""
    import torch

    finish = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    found = []
    for _ in range(times):
        finish()
        begin = time.perf_counter()
        function()
        finish()
        found.append(time.perf_counter() - begin)
    return min(found)


def attention_twice(device, sequence):
    """Return which kernel torch takes for attention, whether its backward gives the same bits eight
    times, and its time.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (
        torch.randn(4, heads, sequence, 64, device=device).bfloat16().requires_grad_() for heads in (32, 8, 8)
    )

    def grads():
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.grad_fn.name(), torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    (name, first), others = grads(), [grads()[1] for _ in range(1 if device == "cpu" else 7)]
    same = all(torch.equal(a, b) for other in others for a, b in zip(first, other))
    return {"kernel": name, "same bits": same, "ms": timed(grads, device, 2) * 1e3}


def child_steps(device, small):
    """Take steps in each form, with a profile."""
    from gpu_steps import FORMS, measure

    return measure(device, small, [*FORMS, "plain torch"], [], True)


CHILDREN = {"kernels": child_kernels, "steps": child_steps}


# ---------------------------------------------------------------- the whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--out", type=Path, default=Path("gpu_first.json"))
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        sys.path.insert(0, str(ROOT / "benchmarks"))
        print(json.dumps(CHILDREN[given.child](given.device, given.small)))
        return
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    found: dict[str, object] = {
        "commit": commit,
        "device": given.device,
        "small": given.small,
        "command": " ".join(sys.argv),
    }
    over = time.monotonic() + 60 * given.minutes
    with TemporaryDirectory(prefix="gpu-first-") as folder:
        machine = GpuMachine(given.device, given.small, Path(folder))
        for name in given.only:
            part, limit = PARTS[name]
            begin = time.monotonic()
            machine.end = min(begin + limit, over)
            print(f"{name}: for {max(0, machine.end - begin):.0f} s at most", flush=True)
            found[name] = here = {}
            if (stopped := attempt(lambda part=part, here=here: part(machine, here))) is not None:
                here["stopped"] = stopped
            found[f"{name}, seconds"] = round(time.monotonic() - begin, 1)
            given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(json.dumps(found[name], indent=1), flush=True)
    print(f"everything is in {given.out}")


if __name__ == "__main__":
    main()

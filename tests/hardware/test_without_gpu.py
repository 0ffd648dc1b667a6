"""A run on the GPU that isn't there (without_gpu/) has the CPU's numbers, also where all happens late.

Needs torch's CUDA build.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from launch import MPIRUN, MPITRAIN, WITH_GPU, mpirun, options, tail

RUN = str(Path(__file__).parent / "without_gpu" / "run.py")
SMALL = {
    "model.layers": 2, "model.width": 32, "model.ffn": 64, "model.heads": 4, "model.kv_heads": 2,
    "data.sequence": 32, "batch.micro": 2,
    "batch.global": 8, "run.steps": 3, "run.eval_batches": 1, "run.save_every": 0,
}  # fmt: skip
needs_cuda = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(), reason="torch's CUDA build, and no GPU, tell"
)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA's headers beside it")
def test_a_torch_for_cpus_is_named_with_what_is_needed():
    done = mpirun(0, sys.executable, RUN, "true")
    assert done.returncode == 2 and "needed torch's CUDA build; pip install torch==2.11.0" in done.output, (
        done.output
    )


def test_no_command_is_reported():
    done = mpirun(0, sys.executable, RUN, "--late", "1")
    assert done.returncode == 2 and "found no command; needed one to run" in done.output, done.output


def losses(where, settings, num_ranks=1, way=None):
    """Return the losses and norms of a run; way: options of the GPU that isn't there."""
    command = [MPITRAIN, "run", *options({**SMALL, **settings, "run.dir": where})]
    if way is None:
        done = mpirun(num_ranks, *command)
    else:
        command = [sys.executable, RUN, *way, MPIRUN, "-n", str(num_ranks), *command]
        done = mpirun(0, *command, env=WITH_GPU, forked=False, timeout=120)
    assert done.returncode == 0, tail(done.output, 30)
    lines = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@needs_cuda
@pytest.mark.parametrize("late", [(), ("--late", "1")], ids=["at once", "late"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"memory.offload": "all"}, {"parallel.zero": 3}, {"parallel.tp": 2}, {"parallel.pp": 2}],
    ids=lambda settings: " ".join(map(str, settings.values())) or "plain",
)
def test_a_run_has_the_numbers_of_the_cpu(tmp_path, settings, late):
    expected = losses(tmp_path / "cpu", {"run.device": "cpu"})
    num_ranks = 2 if any(key.startswith("parallel") for key in settings) else 1
    found = losses(tmp_path / "gpu", {**settings, "run.device": "cuda"}, num_ranks, late)
    assert all(
        abs(a / b - 1) < 1e-5
        for mine, other in zip(found, expected, strict=True)
        for a, b in zip(mine, other)
    ), (found, expected)

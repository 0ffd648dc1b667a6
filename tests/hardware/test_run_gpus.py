"""Runs on GPUs that several ranks share, that launchers hand out, and that are too small.

Only what torch says of them is planted.
"""

import json
import re

import pytest
from folders import SUPPORT
from launch import options, run_commands, tail, tiny, write_text

PROGRAM = SUPPORT / "planted_gpus.py"
H100 = dict(name="NVIDIA H100 PCIe", memory_gib=80, architecture="9.0", vendor="cuda")
MI250X = dict(name="AMD Instinct MI250X", memory_gib=64, architecture="gfx90a", vendor="rocm")


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text.txt")


def run(tmp_path, num_ranks, *commands, each=(), **planted):
    """Run commands on ranks that see such GPUs.

    Return how they ended, and which (rank, index, thread) took its GPU.

    each: what is planted besides, for each command; if absent, the same for all.
    """
    used = tmp_path / "used"
    used.write_text("")
    gpus = json.dumps([planted | others | {"used": str(used)} for others in each or ({},)])
    done = run_commands(num_ranks, *commands, program=PROGRAM, env={"GPUS": gpus})
    return done, {tuple(line.split()) for line in used.read_text().splitlines()}


def test_ranks_that_share_gpus_are_reported_and_count_each_once(tmp_path, text):
    commands = ["run", *tiny(tmp_path / "run", text, run_steps=2, comm_progress="thread")], ["doctor"]
    done, used = run(tmp_path, 4, *commands, seen=[["GPU-a", "GPU-b"]], **H100)
    trained, doctor = done
    assert trained.returncode == 0, tail(trained.output)
    shared = re.search(r"ranks 0 2 share GPU-a of \S+; ranks 1 3 share GPU-b of [^\s:]+", trained.output)
    assert shared and trained.output.count("share GPU-a") == 1, tail(trained.output)
    assert (
        "2 x 756,000 GFLOP/s (NVIDIA H100 PCIe, data sheet of NVIDIA H100 PCIe, dense bf16)" in trained.output
    ), tail(trained.output)
    assert (
        "device buffers go through pinned host memory: " in trained.output
        and "MPIX_Query_cuda_support() = 0" in trained.output
    )
    # run.compile = "auto": this torch has no Triton, which is said once and of one rank
    assert trained.output.count("not compiled, and slower for it: found no Triton on ") == 1
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()][1:]
    flops = [line["mfu"] * 2 * 756e12 / line["tokens_per_s"] for line in lines]
    # 6 and some for each of 40,000 weights
    assert flops[0] == pytest.approx(flops[1]) and 1e5 < flops[0] < 1e6, flops
    places = {("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")}
    assert used == {(*each, thread) for each in places for thread in ("MainThread", "mpitrain-progress")}
    assert doctor.returncode == 0 and doctor.output.count("\nGPU driver") == 1, doctor.output
    facts = {line[:15].strip(): line[15:] for line in doctor.output.splitlines()}
    assert facts["GPU driver"] == "550.54.15"
    assert facts["GPUs"] == "2 x NVIDIA H100 PCIe; rank 0 has NVIDIA H100 PCIe (80 GiB, 9.0, GPU-a)"
    assert facts["shared"] == shared[0] and facts["MPI, cuda"].startswith("takes no device buffers: ")
    assert facts["messages"].startswith("device buffers go through pinned host memory: ")


def test_a_gpu_of_its_own_for_each_rank_is_number_0_of_each(tmp_path, text):
    commands = ["run", *tiny(tmp_path / "run", text, run_steps=1)], ["doctor"]
    (trained, doctor), used = run(tmp_path, 2, *commands, seen=[["GPU-a"], ["GPU-b"]], **MI250X)
    assert trained.returncode == 0 and "share GPU" not in trained.output, tail(trained.output)
    assert "compiled" not in trained.output  # auto compiles for NVIDIA's
    assert "2 x 191,500 GFLOP/s (AMD Instinct MI250X, " in trained.output, tail(trained.output)
    assert used == {("0", "0", "MainThread"), ("1", "0", "MainThread")}
    facts = {line[:15].strip(): line[15:] for line in doctor.output.splitlines()}
    assert facts["shared"].startswith("none") and re.search(
        "MPIX_Query_(hip|rocm)_support", facts["MPI, rocm"]
    ), doctor.output


def test_a_gpu_too_small_for_all_ranks_on_it_is_refused_before_anything_is_written(tmp_path, text):
    """The tiny model keeps about 0.7 MB a rank."""
    device = options({"run.device": "cuda"})
    command = ["run", *tiny(tmp_path / "run", text, run_steps=1, batch_micro=1), *device]
    planted = H100 | {"memory_gib": 0.001, "seen": [["GPU-a"]]}
    (shared,), _ = run(tmp_path, 2, command, **planted)
    assert shared.returncode == 2 and not (tmp_path / "run").exists(), tail(shared.output)
    (line,) = shared.output.splitlines()
    assert (
        line.startswith("ConfigError: 2 ranks share a GPU, and keep at least 0.0")
        and "start fewer ranks on each GPU" in line
    ), line
    (alone,), _ = run(tmp_path, 2, command, **planted | {"seen": [["GPU-a"], ["GPU-b"]]})
    assert alone.returncode == 0, tail(alone.output)
    (small,), _ = run(
        tmp_path, 1, ["run", *tiny(tmp_path / "small", text), *device], **planted | {"memory_gib": 0.0001}
    )
    assert small.returncode == 2 and small.output.startswith("ConfigError: a rank keeps at least"), tail(
        small.output
    )


CANNOT = [  # changes, what is planted, what is said
    (
        {},
        H100 | {"seen": [["GPU-a"], []]},
        ["MeshError: what run.device finds: found no GPU on rank 1, NVIDIA's GPUs on rank 0"],
    ),
    (
        {"run.device": "cuda"},
        H100 | {"seen": [["GPU-a"], []]},
        ["torch finds no GPU, neither NVIDIA's nor AMD's", "on rank 1 only"],
    ),
    (
        {"precision.compute": "fp8"},
        H100 | {"architecture": "8.6"},
        ["compute capability 8.6; needed 8.9 or newer", '"bf16"'],
    ),
    ({"precision.compute": "fp8"}, MI250X, ["architecture gfx90a; needed one with OCP's formats"]),
    ({"precision.compute": "fp8"}, MI250X | {"architecture": "gfx942"}, ["architecture gfx942"]),
    (
        {"comm.device": "direct"},
        H100,
        ['comm.device = "direct"', "cuda_support() = 0", "tried it ended with exit code 1: ", "_cuda_"],
    ),
]


def test_what_a_gpu_cannot_is_one_message(tmp_path, text):
    import torch

    if torch.cuda.is_available():
        pytest.skip("here a child process finds a GPU")
    commands = [
        ["run", *tiny(tmp_path / str(number), text, run_steps=1), *options(changes)]
        for number, (changes, _, _) in enumerate(CANNOT)
    ]
    every, _ = run(
        tmp_path, 2, *commands, each=[planted for _, planted, _ in CANNOT], seen=[["GPU-a", "GPU-b"]]
    )
    for number, (done, (changes, _, words)) in enumerate(zip(every, CANNOT, strict=True)):
        assert done.returncode == 2, tail(done.output)
        (line,) = [line for line in done.output.splitlines() if "Error: " in line]
        assert all(word in line for word in words), line
        # only what run.device = "auto" finds is known later
        assert not (changes and (tmp_path / str(number)).exists())


def test_fp8_is_taken_where_a_gpu_has_it_and_a_key_that_does_nothing_is_reported(tmp_path, text):
    architectures = ("8.9", "10.0")
    changes = [dict(precision_compute="fp8", model_vocab=512)] * 2 + [
        dict(comm_device="staged", run_device="cpu")
    ]
    commands = [
        ["run", *tiny(tmp_path / str(number), text, run_steps=1, **each)]
        for number, each in enumerate(changes)
    ]
    each = [{"architecture": architecture} for architecture in (*architectures, H100["architecture"])]
    every, _ = run(tmp_path, 1, *commands, each=each, **H100, seen=[["a"]])
    assert [done.returncode for done in every] == [0, 0, 0], tail("".join(done.output for done in every))
    assert 'comm.device = "staged" has no effect' in every[2].output, tail(every[2].output)

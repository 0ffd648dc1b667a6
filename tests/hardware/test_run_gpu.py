"""`mpitrain run` on a GPU that its ranks share.

It says what it does there, stops and resumes, and gives the same bits each time.

A function of the device, as in tests/hardware/test_gpu_steps.py: the CPU's turn shows that the test can run.
"""

import pytest
from conftest import LONG
from launch import WITH_GPU, loss_lines, run_tiny, tail, write_text

MESSAGES = {
    "cpu": ["; cpu, threads a rank"],
    "cuda": [
        "; cuda, threads a rank",
        "the same bits every time: deterministic kernels",
        "device buffers go",
        "reserved by torch",
    ],
}


@pytest.fixture
def device(request):
    if request.param == "cuda":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
    return request.param


CASES = [
    pytest.param("cpu", 2, marks=LONG),
    *(pytest.param("cuda", num_ranks, marks=pytest.mark.gpu) for num_ranks in (1, 2)),
]


@pytest.mark.parametrize(("device", "num_ranks"), CASES, indirect=["device"])
def test_a_run_that_was_stopped_resumes_with_the_bits_of_one_that_was_not(tmp_path, device, num_ranks):
    text = write_text(tmp_path / "text.txt")

    def run(name, steps):
        changes = dict(
            run_device=device, run_steps=steps, run_save_every=2, run_eval_every=2, schedule_name="constant"
        )
        done = run_tiny(
            num_ranks,
            tmp_path / name,
            text,
            env=WITH_GPU if device == "cuda" else None,
            precision_compute="bf16",
            **changes,
        )
        assert done.returncode == 0, tail(done.output)
        return done.output

    said = run("whole", 6)
    assert all(words in said for words in MESSAGES[device]), tail(said)
    run("again", 6)
    run("stopped", 4)
    assert "resuming after step 4" in run("stopped", 6)
    whole, again, stopped = (loss_lines(tmp_path / name) for name in ("whole", "again", "stopped"))
    assert again == whole
    assert stopped[-2:] == whole[-2:] and stopped[:4] == whole[:4]

"""What is made of what torch says of GPUs.

Which one a rank takes, what names it, its peak, whether its memory is enough.
"""

from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (["ab", "ab", "ab", "ab"], "abab"),  # all see all: in turn
        (["a", "b", "c"], "abc"),  # the launcher gave each its own
        (["a", "a"], "aa"),
        (["ab", "ba"], "ab"),  # turned
        (["ab", "ab", "cd", "cd"], "abcd"),  # a socket's to each
        (["abcd", "b", "abcd", "abcd", "abcd"], "abcda"),  # mixed
        (["abc"] * 7, "abcabca"),
    ],
)
def test_ranks_of_a_node_take_gpus_in_turn_however_they_see_them(seen, expected):
    from mpitrain.training.machine.gpus import share_out

    assert share_out([list(each) for each in seen]) == list(expected)


def test_a_rank_that_sees_none_takes_none():
    from mpitrain.training.machine.gpus import share_out

    assert share_out([[], ["a"], []]) == [None, "a", None]


UUID = "ffc79498-8ff3-c2dc-3b0d-fafd804516ae"
PCI = dict(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
ZEROS = "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("properties", "index", "vendor", "environment", "expected"),
    [
        (dict(uuid=UUID, **PCI), 0, "cuda", {}, f"GPU-{UUID}"),
        (dict(uuid="MIG-1"), 0, "cuda", {}, "MIG-1"),
        (dict(uuid=ZEROS, **PCI), 0, "rocm", {}, "PCI 0000:c1:00"),
        (dict(uuid=ZEROS), 1, "rocm", {"ROCR_VISIBLE_DEVICES": "4,5"}, "number 5"),
        (
            dict(uuid=ZEROS),
            1,
            "rocm",
            {"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "1,0"},
            "number 4",
        ),
        (dict(), 1, "cuda", {"CUDA_VISIBLE_DEVICES": "2, 3"}, "number 3"),
        (dict(), 0, "cuda", {"CUDA_VISIBLE_DEVICES": f"GPU-{UUID}"}, f"GPU-{UUID}"),
        (dict(), 2, "cuda", {}, "number 2"),
    ],
)
def test_what_names_a_gpu_is_the_same_in_every_process(properties, index, vendor, environment, expected):
    from mpitrain.training.machine.gpus import identity

    assert identity(SimpleNamespace(**properties), index, vendor, environment) == expected


@pytest.mark.parametrize(
    ("hip", "vendor", "architecture"), [(None, "cuda", "9.4"), ("6.4.1", "rocm", "gfx942")]
)
def test_torch_is_asked_whose_gpus_its_cuda_devices_are(monkeypatch, hip, vendor, architecture):
    import torch

    from mpitrain.training.machine import gpus

    properties = dict(
        name="some GPU",
        major=9,
        minor=4,
        gcnArchName="gfx942:sramecc+:xnack-",
        total_memory=64 << 30,
        uuid=UUID,
    )
    answers = dict(is_available=True, device_count=2, get_device_properties=SimpleNamespace(**properties))
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = gpus.torch_gpus()
    assert found.vendor == vendor and found.kind == "cuda"
    assert found.seen == (gpus.Gpu("some GPU", f"GPU-{UUID}", 64 << 30, architecture),) * 2


def test_the_kernel_knows_the_driver(tmp_path):
    from mpitrain.training.machine.gpus import driver

    nvidia = tmp_path / "nvidia"
    amd = tmp_path / "amd"
    nvidia.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC "
        "version: 12.3\n"
    )
    amd.write_text("6.12.12\n")
    files = {"cuda": nvidia, "rocm": amd}
    assert driver("cuda", files) == "550.54.15" and driver("rocm", files) == "6.12.12"
    assert driver("cuda", {"cuda": tmp_path / "none"}) == ""


# ---------------------------------------------------------------- the peak


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI300A", 980.6),
        ("AMD Instinct MI250X", 191.5),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),  # a seventh of it
        ("NVIDIA H100 64GB HBM2", None),  # made for one centre
        ("NVIDIA H800", None),
        ("NVIDIA L40", None),
        ("NVIDIA A1000", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_data_sheets_are_of_the_very_gpu(name, tflops):
    from mpitrain.training.machine.peak_flops import data_sheet

    found = data_sheet(name)
    assert (found and found.flops) == (tflops and tflops * 1e12)


class Planted:
    """A GPU of 400 TFLOP/s that takes 20 us to begin, multiplies 128 blocks at once, and loads a
    kernel at its first product of a kind.
    """

    def __init__(self):
        self.loaded = set()
        self.work = None

    def multiply(self, n, dtype):
        def work():
            self.work = (n, dtype)

        return work

    def seconds(self, work):
        work()
        n, _ = self.work
        first = self.work not in self.loaded
        self.loaded = {*self.loaded, self.work}
        waves = -(-((n / 256) ** 2) // 128) * 128 / (n / 256) ** 2
        return 20e-6 + 2 * n**3 / 400e12 * waves + first


def test_a_gpu_without_data_sheet_is_timed_by_what_fills_it():
    import torch

    from mpitrain.training.machine.peak_flops import SIZES_OF_GPU, fastest

    gpu = Planted()
    small, *_ = fastest([torch.bfloat16], [512], gpu.multiply, gpu.seconds)
    best, dtype, n = fastest([torch.bfloat16], SIZES_OF_GPU, gpu.multiply, gpu.seconds)
    assert small < 20e12  # what a product of 512 x 512 would have said
    assert 380e12 < best < 400e12 and (dtype, n) == (torch.bfloat16, 8192)


def test_what_is_timed_takes_little_of_the_memory_of_a_gpu():
    import torch

    from mpitrain.training.machine.peak_flops import _fitting

    assert list(_fitting(torch.bfloat16, 80 << 30)) == [2048, 4096, 8192]
    assert list(_fitting(torch.float64, 8 << 30)) == [2048, 4096]
    assert list(_fitting(torch.float64, 1 << 20)) == [2048]


def test_different_gpus_add_up():
    from mpitrain.training.machine.peak_flops import PeakFlops, gpus_peak, peak_of_ranks

    found = gpus_peak(
        [
            PeakFlops(989e12, "an H100"),
            PeakFlops(312e12, "an A100"),
            PeakFlops(989e12, "an H100"),
            PeakFlops(100e12, "timed"),
            PeakFlops(102e12, "timed"),
        ]
    )
    assert found.flops == pytest.approx(2492e12)
    assert (
        found.source
        == "2 x 989,000 GFLOP/s (an H100) + 1 x 312,000 GFLOP/s (an A100) + 2 x 101,000 GFLOP/s (timed)"
    )
    assert peak_of_ranks(PeakFlops(30e9, "a product"), 4) == (120e9, "30 GFLOP/s a rank (a product)")


def test_cpus_are_timed_as_they_are():
    import torch

    from mpitrain.training.machine.device_placement import CPU
    from mpitrain.training.machine.peak_flops import _of

    found = _of(CPU, torch.float64)
    assert 1e8 < found.flops < 1e14
    product, _, how = found.source.partition(", the best of 20 by processor time")
    assert product == "float64 product of 512 x 512 matrices" and how.endswith(", on rank 0"), found.source


def test_the_peak_of_a_cpu_leaves_out_what_others_do_meanwhile():
    """A product that waits for 30 ms each time, as beside busy neighbours, has the same peak and
    says that it was disturbed.
    """
    import time

    import torch

    from mpitrain.training.machine.peak_flops import ProcessorTime, fastest

    def disturbed(n, dtype):
        a = torch.ones(n, n, dtype=dtype)
        return lambda: (time.sleep(0.03), a @ a)

    alone = ProcessorTime()
    alongside = ProcessorTime()
    a = torch.ones(512, 512)
    rate, *_ = fastest([torch.float32], [512], lambda n, dtype: lambda: a @ a, alone)
    slower, *_ = fastest([torch.float32], [512], disturbed, alongside)
    assert slower / rate > 0.2 and "of a core)" in alongside.disturbed()


# ---------------------------------------------------------------- its memory


def plan(*settings, ranks=2):
    from mpitrain import config
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    return plan_of(resolve(config.load(None, ("parallel.pp=2", "batch.global=8", *settings)), ranks, 256))


def test_all_ranks_on_a_gpu_share_its_memory():
    from mpitrain.errors import ConfigError
    from mpitrain.plan.predict.memory import predict
    from mpitrain.plan.predict.node_memory import require_gpu_memory

    of_two = plan()
    first, second = (
        usage.on_device - usage.working - usage.messages for usage in predict(of_two, on_gpu=True)
    )
    require_gpu_memory(of_two, [0], "a GPU", first)
    require_gpu_memory(of_two, [0, 1], "a GPU", first + second)
    with pytest.raises(
        ConfigError, match=r"2 ranks share a GPU, and keep at least .* start fewer ranks on each GPU"
    ):
        require_gpu_memory(of_two, [0, 1], "a GPU", first + second - 1)
    with pytest.raises(ConfigError, match="3 ranks share"):
        require_gpu_memory(of_two, [0, 1, 1], "a GPU", first + second)
    with pytest.raises(
        ConfigError, match=r"a rank keeps at least .* a GPU has .* GiB; choose a smaller model"
    ):
        require_gpu_memory(of_two, [1], "a GPU", second - 1)


def test_what_is_offloaded_takes_no_memory_of_a_gpu_and_what_experts_may_get_is_not_counted():
    from mpitrain.plan.predict.memory import predict
    from mpitrain.plan.predict.node_memory import require_gpu_memory

    offloaded = plan("memory.offload=optimizer")
    experts = plan("model.family=mixtral")
    require_gpu_memory(offloaded, [0], "a GPU", predict(plan())[0].on_device - predict(plan())[0].moments)
    usage = predict(experts)[0]
    require_gpu_memory(experts, [0], "a GPU", usage.on_device - usage.activations)


def test_on_a_gpu_attention_keeps_no_probabilities():
    """Of a short sequence in 16 bits they are kept on a CPU.

    Where a run computes is known to it, or asked for.
    """
    from mpitrain.plan.declared.probabilities import count
    from mpitrain.plan.predict.memory import predict
    from mpitrain.plan.predict.node_memory import require_gpu_memory

    narrow = (
        "precision.compute=bf16",
        "model.heads=4",
        "model.width=128",
        "data.sequence=96",
        "parallel.pp=1",
        "parallel.dp=1",
        "run.compile=true",  # else a CPU keeps silu(gate), too
    )
    of_one = plan(*narrow, ranks=1)
    (on_cpu,), (on_gpu,) = predict(of_one), predict(of_one, on_gpu=True)
    assert on_cpu.activations - on_gpu.activations == of_one.config.model.layers * 4 * count(96) * 2
    assert predict(plan(*narrow, "run.device=cuda", ranks=1)) == [on_gpu]
    require_gpu_memory(of_one, [0], "a GPU", on_gpu.on_device)

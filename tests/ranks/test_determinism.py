"""`numerics.deterministic`: which operations a step is made of, and that CUDA has a deterministic
kernel for each.

No GPU is needed: what a layer dispatches is written down on a CPU, under every kind of layer and
layout, and held against torch's own list (torch.use_deterministic_algorithms, 2.13). Attention is
the exception: which of its kernels CUDA takes, a CPU can't tell.
"""

import pytest
from conftest import agree, but_for

pytestmark = pytest.mark.few_ranks

LAYERS = "model.layers=2", "batch.global=8", "batch.micro=2"
EXPERTS = "experts.count=4", "experts.active=2", "experts.width=12"
KINDS = {
    "dense": (),
    "documents": ("data.documents=separate",),
    "bf16": ("precision.compute=bf16", "optimizer.moments=bf16", "model.tied=false"),
    "fp16": ("precision.compute=fp16", "optimizer.name=sgd"),
    "fp8": ("precision.compute=fp8", "optimizer.name=muon"),
    "selective": ("memory.recompute=selective", "model.family=qwen3"),
    "offload": ("memory.offload=all",),
    "mtp": ("model.mtp=2",),
    "segments": ("pipeline.schedule=seq1f1b",),
    "experts": ("model.family=mixtral", *EXPERTS, "experts.z_weight=0.1", "experts.capacity=1.0"),
    "sinks": ("model.family=gpt-oss", *EXPERTS, "attention.window=3", "data.documents=separate"),
    "latent": (
        "model.family=deepseek-v3", "model.kv_heads=2", *EXPERTS, "experts.first=1", "experts.groups=2",
        "experts.groups_active=1",
        "model.mtp=1", "attention.head_width=8", "attention.q_rank=12", "attention.kv_rank=10",
        "attention.rotary_width=6",
        "attention.value_width=8",
    ),
}  # fmt: skip
LAYOUTS = {
    1: {kind: ("dp=1",) for kind in KINDS},
    2: {
        "dense": (
            "tp=2",
            "tp=2 async_tp=true",
            "tp=2 sequence=false model.mtp=1",
            "cp=2",
            "cp=2 context=ulysses",
            "dp=2 zero=3",
        ),
        "documents": ("cp=2", "cp=2 context=gather"),
        "sinks": ("cp=2", "dp=2 etp=2"),
        "latent": ("tp=2 ep=2", "dp=2 ep=2 zero=3"),
        "experts": (
            "dp=2 ep=2 experts.wire=fp8",
            "dp=2 ep=2 comm.node_ranks=1",
            "dp=2 etp=2 experts.buffer=0.5",
        ),
    },
    4: {
        "experts": ("dp=4 ep=4 comm.node_ranks=2", "dp=4 ep=4 comm.node_ranks=2 experts.wire=bf16"),
        "dense": ("tp=2 cp=2",),
    },
}
CASES = [
    (size, kind, layout)
    for size, kinds in LAYOUTS.items()
    for kind, layouts in kinds.items()
    for layout in layouts
]
LONGER = [
    (2, "dense", "tp=2 sequence=false model.mtp=1"), (2, "documents", "cp=2 context=gather"),
    (2, "experts", "dp=2 ep=2 comm.node_ranks=1"), (4, "experts", "dp=4 ep=4 comm.node_ranks=2"),
    (4, "dense", "tp=2 cp=2"), (4, "experts", "dp=4 ep=4 comm.node_ranks=2 experts.wire=bf16"),
    (2, "experts", "dp=2 etp=2 experts.buffer=0.5"), (1, "selective", "dp=1"), (1, "segments", "dp=1"),
    (1, "bf16", "dp=1"),
]  # fmt: skip

# ---------------------------------------------------------------- torch's list, as names of aten

REFUSED = {  # with use_deterministic_algorithms(True), on CUDA
    "put", "put_", "histc", "nll_loss_forward", "nll_loss2d_forward", "median.dim", "kthvalue",
    "scatter_reduce.two",
    "scatter_reduce_.two", "embedding_bag_backward", "_embedding_bag_backward", "_ctc_loss_backward",
    "grid_sampler_2d_backward",
    "avg_pool3d_backward", "max_unpool2d", "max_unpool3d", "reflection_pad1d_backward",
    "reflection_pad2d_backward", "resize_as_",
    "upsample_linear1d_backward", "upsample_bilinear2d_backward", "adaptive_max_pool2d_backward",
}  # fmt: skip
REFUSED_OF_SOME = {  # by what it is given
    "bincount": lambda x, weights=None, *_: weights is not None,
    "cumsum": lambda x, *_: x.is_floating_point(),
    "cumsum_": lambda x, *_: x.is_floating_point(),
}
SLOWER = {  # it becomes deterministic, and slower: which of them are there, and why they stay
    "index_add_": "rows of the embedding, and numbers of tokens: sums of runs after a sort",
    "index_put_": "each place once, but a sort comes first; of N targets, or of a token's experts",
    "scatter_add_": "how many tokens have chosen an expert: whole numbers",
    "scatter_add": "the backward of `gather`, of a token's experts: each place once",
}
ALSO_SLOWER = {
    "index_put",
    "_index_put_impl_",
    "index_add",
    "index_copy",
    "index_copy_",
    "scatter.src",
    "scatter_.src",
}
ALSO_SLOWER |= {
    "scatter_reduce",
    "scatter_reduce_",
    "index_select_backward",
    "embedding_dense_backward",
    "embedding_backward",
}
# on a CPU; on CUDA one of flash, memory-efficient, or plain products, all deterministic when told
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip


def dispatched(run):
    """Run something; return {name of an operation.

    The arguments it was called with}, for the operations that concern us.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    found = {}

    class Writing(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function._schema.name.removeprefix("aten::")
            full = f"{name}.{function._overloadname}" if function._overloadname != "default" else name
            for each in {name, full}:
                found.setdefault(each, []).append((args, kwargs or {}))
            return function(*args, **(kwargs or {}))

    with Writing():
        run()
    return found


def wrong(found):
    """Return what of some operations isn't deterministic on CUDA, or has no reason to be slower."""
    refused = [name for name in REFUSED if name in found]
    refused += [
        name
        for name, refuses in REFUSED_OF_SOME.items()
        if any(refuses(*args, **kwargs) for args, kwargs in found.get(name, ()))
    ]
    return refused + [name for name in ALSO_SLOWER if name in found]


@pytest.fixture
def set_determinism():
    """Tell torch, as a run on a GPU does, and take it back."""
    import torch

    from mpitrain.config import Numerics
    from mpitrain.training.machine.determinism import settle

    filled = torch.utils.deterministic.fill_uninitialized_memory
    yield lambda deterministic, environment=None: settle(
        Numerics(deterministic=deterministic), {} if environment is None else environment
    )
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.backends.cuda.enable_cudnn_sdp(True)


def config_of(world, kind, layout):
    from training import resolved

    return resolved(
        world,
        *LAYERS,
        *KINDS[kind],
        *(word if "." in word else f"parallel.{word}" for word in layout.split()),
    )


@pytest.mark.few_cases(5)
@pytest.mark.sizes(1, 2)
@pytest.mark.mpi
@pytest.mark.parametrize(("size", "kind", "layout"), but_for(CASES, LONGER), ids=str)
def test_no_operation_is_one_that_a_gpu_does_in_any_order_and_a_cpu_has_the_same_bits_when_set(
    world, set_determinism, size, kind, layout
):
    """And nothing reads memory that nobody has written: it is filled with NaN meanwhile."""
    import torch
    from training import same, train

    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    config = config_of(world, kind, layout)
    expected = []
    found = dispatched(lambda: expected.append(train(world, config)))
    agree(world, "mm" in found and not wrong(found), f"{wrong(found)}")
    set_determinism(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    agree(world, same(train(world, config), expected[0]), f"{kind} {layout}")


@pytest.mark.mpi
def test_what_may_be_slower_is_needed(world):
    """A reason that no layer has any more would excuse the next one."""
    from training import train

    configs = [config_of(world, kind, "dp=1") for kind in ("dense", "experts")]
    found = dispatched(lambda: [train(world, config) for config in configs])
    agree(world, {*SLOWER, *ATTENTION} <= {*found}, f"{ {*SLOWER, *ATTENTION} - {*found} }")


@pytest.mark.parametrize("name", ["put_", "index_copy_", "cumsum", "bincount"])
def test_what_a_gpu_would_refuse_is_found(name):
    import torch

    x = torch.zeros(4)
    places = torch.tensor([0, 2])
    values = torch.ones(2)
    calls = {
        "put_": lambda: x.put_(places, values),
        "index_copy_": lambda: x.index_copy_(0, places, values),
        "cumsum": lambda: (x.cumsum(0), places.cumsum(0)),
        "bincount": lambda: (torch.bincount(places, values), torch.bincount(places)),
    }
    assert wrong(dispatched(calls[name])) == [name]
    assert not wrong(dispatched(lambda: (places.cumsum(0), torch.bincount(places), x[places], x.mul_(2))))


# ---------------------------------------------------------------- what torch is told


def test_torch_is_set(set_determinism):
    import torch

    environment = {}
    set_determinism(True, environment)
    assert (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    assert (
        environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        and not torch.utils.deterministic.fill_uninitialized_memory
    )
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    set_determinism(False, environment := {})
    assert (
        not torch.are_deterministic_algorithms_enabled()
        and torch.backends.cuda.cudnn_sdp_enabled()
        and not environment
    )


@pytest.mark.parametrize("value", [":4096:8", ":16:8", ":0:0", ""])
def test_a_workspace_of_the_users_own_is_kept_or_refused(set_determinism, value):
    from mpitrain.errors import ConfigError

    environment = {"CUBLAS_WORKSPACE_CONFIG": value}
    if value in (":4096:8", ":16:8"):
        set_determinism(True, environment)
    else:
        with pytest.raises(
            ConfigError, match=r"with :4096:8 or :16:8 only; unset it, or set numerics\.deterministic=false"
        ):
            set_determinism(True, environment)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": value}


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_rank_with_a_gpu_sets_torch_and_one_without_does_not(set_determinism, monkeypatch, deterministic):
    from mpitrain import config
    from mpitrain.training.machine import device_placement
    from mpitrain.training.machine.gpus import Gpu, Gpus

    asked = []
    monkeypatch.setattr(device_placement, "settle", lambda numerics: asked.append(numerics.deterministic))
    given = config.load(None, [f"numerics.deterministic={str(deterministic).lower()}"])
    for vendor, expected in ((None, []), ("cuda", [deterministic])):
        found = Gpus(vendor, (Gpu("NVIDIA H100 PCIe", "a", 80 * 2**30, "9.0"),), "", lambda index: None)
        monkeypatch.setattr(device_placement.gpus, "torch_gpus", lambda found=found: found)
        assert device_placement.looked_for(given) is found
        assert asked == expected

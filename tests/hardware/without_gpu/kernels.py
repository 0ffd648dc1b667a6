"""What the kernels of device.cpp would compute, computed on the CPU: the device's memory is the host's.

In the place of each of torch's CUDA kernels comes a function that has the CPU's compute, then calls
torch's own, which allocates and checks as on a GPU, and whose kernels do nothing, and writes the
numbers to what that returned. What is queued in the stream before happens first. What has no
counterpart on the CPU is written out here.
"""

import ctypes
import threading
import warnings
from collections.abc import Callable

import torch
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
MADE_ALONE = {
    "empty",
    "empty_strided",
    "resize_",
    "set_",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "_local_scalar_dense",
    "copy_",
}
NOT_IMITATED = (
    "_cudnn",
    "cudnn",
    "miopen",
    "_nested",
    "_sparse",
    "sparse",
    "_linalg",
    "_fft",
    "_cslt",
    "_fused_sdp",
)
# shapes of results
COUNTED = {
    "index",
    "nonzero",
    "_unique",
    "_unique2",
    "unique_dim",
    "masked_select",
    "bincount",
    "repeat_interleave",
}
# it gives another a number on the device, which Python can't be given
NOT_CALLED = COUNTED | {"pow"}
_run = ctypes.CDLL(None).unreal_gpu_run
_run.argtypes = [ctypes.c_void_p]
_within = threading.local()


def run_queued() -> None:
    """Have all happen that is queued in the current stream."""
    _run(torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))


def on_cpu(x):
    """Return a tensor of the device as one of the CPU, in the same memory; anything else as it is."""
    if isinstance(x, torch.device) and x.type == "cuda":
        return torch.device("cpu")
    if not isinstance(x, torch.Tensor) or not x.is_cuda:
        return x
    if not x.numel():
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    storage = x.untyped_storage()
    memory = torch.frombuffer(
        (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8
    )
    return torch.empty(0, dtype=x.dtype).set_(
        memory.untyped_storage(), x.storage_offset(), x.size(), x.stride()
    )


def on_device(x: torch.Tensor) -> torch.Tensor:
    found = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    on_cpu(found).copy_(x)
    return found


def _tensors(x) -> list[torch.Tensor]:
    return [each for each in tree_flatten(x)[0] if isinstance(each, torch.Tensor)]


def _as_tensor(x, arguments):
    """Return a number as a tensor that leaves the type of the others what it is, as a number does."""
    other = next((each.dtype for each in arguments if isinstance(each, torch.Tensor)), torch.bool)
    fits = other.is_floating_point or (type(x) is int and other != torch.bool)
    return torch.tensor(x, dtype=other if fits else None)


def imitation(name: str, compute: Callable, original: Callable, schema: torch.FunctionSchema) -> Callable:
    """Return what is called in the place of torch's kernel `name`."""
    changed = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    names = [a.name for a in schema.arguments]
    wants_tensor = [str(a.type) == "Tensor" for a in schema.arguments]
    alone = name in NOT_CALLED and not changed
    first_only = "embedding_bag" in name

    def call(keys, *args, **kwargs):
        args = [
            _as_tensor(x, args) if wanted and isinstance(x, (int, float)) else x
            for x, wanted in zip(args, wants_tensor)
        ]
        if getattr(_within, "it", False):  # of a kernel that is imitated as a whole
            return original.call_boxed(keys, *args, **kwargs)
        run_queued()
        given = {key: tree_map(on_cpu, x) for key, x in (*zip(names, args), *kwargs.items())}
        copies = {
            key: tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, given[key])
            for key in changed & given.keys()
        }
        used = given | copies
        expected = compute(*(used[key] for key in names[: len(args)]), **{key: used[key] for key in kwargs})
        if alone:
            return (
                tuple(map(on_device, expected))
                if isinstance(expected, (tuple, list))
                else on_device(expected)
            )
        _within.it = True
        try:
            found = original.call_boxed(keys, *args, **kwargs)
        finally:
            _within.it = False
        run_queued()
        for key, copy in copies.items():
            for x, y in zip(_tensors(given[key]), _tensors(copy)):
                if x.shape == y.shape:  # else torch's own has given it memory
                    x.copy_(y)
        theirs = {x.data_ptr() for key in copies for x in _tensors(given[key])}
        pairs = list(zip(_tensors(found), _tensors(expected)))
        for x, y in pairs[:1] if first_only else pairs:
            if x.is_cuda and x.numel() and not (changed and x.data_ptr() in theirs):
                target = on_cpu(x)
                # the log-sum-exp of one has a margin
                (target[..., : y.shape[-1]] if "attention" in name else target).copy_(y)
        return found if _tensors(found) or found is None else expected

    return call


# ---------------------------------------------------------------- without a counterpart on the CPU


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    wide = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        q.contiguous(), *wide, 0.0, is_causal, scale=scale
    )


def flash_backward(
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, seed, offset, *, scale=None
):
    groups = q.shape[1] // k.shape[1]
    wide = (x.repeat_interleave(groups, 1) for x in (k, v))
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    of_q, *others = backward(
        grad.contiguous(), q.contiguous(), *wide, out.contiguous(), lse, 0.0, is_causal, scale=scale
    )
    return of_q, *(x.unflatten(1, (-1, groups)).float().sum(2).to(x.dtype) for x in others)


def efficient(q, k, v, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        q, k, v, 0.0, is_causal, attn_mask=attn_bias, scale=scale
    )


def efficient_backward(
    grad, q, k, v, attn_bias, out, lse, seed, offset, dropout_p, mask, is_causal=False, *, scale=None
):
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return backward(
        grad, q, k, v, out, lse[..., : q.shape[2]], 0.0, is_causal, attn_mask=attn_bias, scale=scale
    )


def mm_into(a, b, out_dtype):
    return a.to(out_dtype) @ b.to(out_dtype)


def addmm_into(x, a, b, out_dtype, *, beta=1, alpha=1, out=None):
    found = torch.addmm(x.to(out_dtype), a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha)
    return found if out is None else out.copy_(found)


def scaled_mm(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype or a.dtype)


def log_softmax(x, dim, half_to_float):
    return torch.log_softmax(x.float() if half_to_float else x, dim)


WRITTEN_OUT = {
    "_log_softmax": log_softmax,
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "mm.dtype": mm_into, "bmm.dtype": mm_into, "addmm.dtype": addmm_into, "addmm.dtype_out": addmm_into,
    "_scaled_mm": scaled_mm,
}  # fmt: skip


# ---------------------------------------------------------------- in their place


def copying(original: Callable) -> Callable:
    """Return what copies: between host and device torch's own, which queues it; all others have a kernel."""

    def copy(keys, x, source, non_blocking=False):
        plain = (
            x.dtype == source.dtype
            and x.shape == source.shape
            and x.is_contiguous()
            and source.is_contiguous()
        )
        if plain and x.is_cuda != source.is_cuda:
            return original.call_boxed(keys, x, source, non_blocking)
        run_queued()
        on_cpu(x).copy_(on_cpu(source))
        return x

    return copy


def install() -> torch.library.Library:
    """Put imitations in the place of torch's kernels; they stay as long as what is returned does."""
    torch.cuda.init()
    library = torch.library.Library("aten", "IMPL")
    found = {"copy_": copying(torch.library.get_kernel("aten::copy_", "CUDA"))}
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        space, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        if (
            space != "aten"
            or packet in MADE_ALONE
            or packet.startswith(NOT_IMITATED)
            or not hasattr(aten, packet)
        ):
            continue
        operation = getattr(getattr(aten, packet), overload or "default")
        is_view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in operation._schema.returns
        )
        if not is_view:
            original = torch.library.get_kernel(full, "CUDA")
            found[name] = imitation(packet, WRITTEN_OUT.get(name, operation), original, operation._schema)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's own were there before
        for name, function in found.items():
            library.impl(name, function, "CUDA", with_keyset=True)
    return library

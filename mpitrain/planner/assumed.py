"""What is known of frameworks where a table of steps says nothing.

A convention is what a framework does unless set otherwise, with its source. What nobody knows and
decides (recomputation; the microbatch with ZeRO-3) is no convention: such a row gets an interval.
"""

import re
from typing import NamedTuple


class Convention(NamedTuple):
    """What a framework does. None: it isn't known.

    counts_recomputed: its MFU or TFLOP/s count what is recomputed. halved: of causal attention
    they count what isn't masked. max_allocated: its memory is what torch allocated at most.
    again: of products, the share that its selective recomputation repeats. kernel: of attention,
    one of KERNELS of a machine's file. awaits: as of a layout. narrow_gathers:
    in fp8 tp and ZeRO gather fp8.
    """

    pattern: str
    source: str
    recompute: str | None = None
    flash: bool = True
    fused: bool = True
    sequence_parallel: bool = True
    zero: int = 1
    overlapped: bool = True
    wire_bytes: int = 4
    tp_overlap: float = 0.0
    counts_recomputed: bool = False
    halved: bool = False
    ends_count: bool = False
    max_allocated: bool = False
    again: float = 0.0
    dispatch: str = "alltoall"
    kernel: str = "flash2"
    awaits: float = 1.0
    narrow_gathers: bool = False


# what Python takes for a kernel, over a launch of 5 us: 20.3 us for each of 645,099 products of experts in a
# profile of Qwen3 30B with Megatron-LM (yanring/Megatron-MoE-ModelZoo, issue 7)
OF_PYTHON = 4.0
CONVENTIONS = (
    Convention(
        r"zero-bubble|zero bubble|controllable-memory", "arXiv:2401.10241, table 4: 59 GB of the "
        "1.5B model are 34 s b h + 5 a s^2 b a layer, so neither recomputation nor a flash kernel",
        recompute="none", flash=False, zero=0, ends_count=True, max_allocated=True,
    ),
    Convention(
        r"ptd-?p|^zero-3$", "arXiv:2104.04473, sections 3.5 and 5.1: recomputation, FLOPs by "
        "equation 3",
        recompute="full", flash=False, sequence_parallel=False, zero=0, overlapped=False,
        counts_recomputed=True,
    ),
    Convention(
        r"sp\+selective", "arXiv:2205.05198, section 6", recompute="selective", flash=False, zero=0,
        overlapped=False,
    ),
    Convention(
        r"full recompute", "arXiv:2205.05198, section 6: the baseline has no sequence parallelism",
        recompute="full", flash=False, sequence_parallel=False, zero=0, overlapped=False,
    ),
    Convention(
        r"automodel", "NVIDIA-NeMo/Automodel, examples/benchmark/configs: FSDP2 with Transformer Engine",
        zero=3, halved=True, kernel="cudnn",
    ),
    Convention(
        r"megatron-bridge|nemo", "NVIDIA-NeMo/Megatron-Bridge, performance recipes: none but "
        "where stated, gradients reduced in bf16; Transformer Engine takes cuDNN's attention on "
        "Hopper and Blackwell, and gathers fp8; training/mixed_precision.py: fp8_param_gather",
        recompute="none", tp_overlap=0.5, halved=True, kernel="cudnn", wire_bytes=2, narrow_gathers=True,
        awaits=OF_PYTHON,
    ),
    Convention(
        r"megatron-moe-modelzoo|moe recipes", "yanring/Megatron-MoE-ModelZoo, model_configs/benchmarking",
        halved=True, kernel="cudnn", tp_overlap=0.5, awaits=OF_PYTHON,
    ),
    Convention(
        r"megascale", "arXiv:2402.15627, section 3: overlapped; recomputation: a guess", recompute="none",
        tp_overlap=0.5,
    ),
    Convention(r"^megatron-lm$", "arXiv:2402.15627, section 6.1; recomputation: a guess", recompute="none"),
    Convention(
        r"^megatron-core$", "arXiv:2406.11704, section 2.4; recomputation: a guess", recompute="none",
        kernel="cudnn",
    ),
    Convention(
        r"nanotron", "Ultra-Scale Playbook, its benchmark: none recomputed, tp_mode REDUCE_SCATTER",
        recompute="none", fused=False,
    ),
    Convention(
        r"torchtitan", "pytorch/torchtitan, its benchmark page; selective: every second product "
        "is kept; docs/float8.md: tp gathers fp8, and FSDP may",
        zero=3, again=0.5, narrow_gathers=True,
    ),
    Convention(r"^fsdp|fsdp\+ep", "as below", zero=3, halved=True, kernel="cudnn", awaits=0.0),
    Convention(
        r"mcore|tp\+ep\+dp", "arXiv:2504.14960, section 4.1, table 3: experts have a capacity; MFU by "
        "num_floating_point_operations() of NVIDIA/Megatron-LM (megatron/training/training.py); vpp, which "
        "its tables leave out: 7 of Mixtral 8x22B (megatron/core/transformer/moe/README.md) and of Qwen2 "
        "(yanring/Megatron-MoE-ModelZoo, runtime.conf), a block a stage, and so of the others; "
        "recomputation: a guess", recompute="none",
        halved=True, kernel="cudnn", awaits=0.0,
    ),
    Convention(
        r"llm-?foundry|mosaic", "mosaicml/llm-foundry, of 2023: flash attention 1, nothing compiled",
        zero=3, kernel="flash1", fused=False,
    ),
    Convention(r"^mpitrain", "mpitrain, defaults", recompute="none", halved=True, kernel=""),
    Convention(
        r"internevo", "InternLM/InternEvo, of 2023: flash attention 1, nothing compiled", fused=False,
        sequence_parallel=False, wire_bytes=2, kernel="flash1",
    ),
    Convention(
        r"bigscience.*02-28", "as below; embedding and head count as a block each", flash=False,
        sequence_parallel=False, overlapped=False, ends_count=True,
    ),
    Convention(
        r"bigscience", "bigscience-workshop/Megatron-DeepSpeed: Megatron-LM of 2021", flash=False,
        sequence_parallel=False, overlapped=False, wire_bytes=2,
    ),
    Convention(
        r"fms-fsdp", "foundation-model-stack/fms-fsdp, policies/mixed_precision.py", zero=3, fused=False,
        wire_bytes=2,
    ),
    Convention(r"deepspeed", "microsoft/DeepSpeed, defaults", overlapped=False),
)  # fmt: skip
UNKNOWN = Convention("", "nothing is known of this framework here")


def convention_of(system: str) -> Convention:
    """Return what is known of a system by its name."""
    name = system.lower().strip()
    return next((each for each in CONVENTIONS if re.search(each.pattern, name)), UNKNOWN)

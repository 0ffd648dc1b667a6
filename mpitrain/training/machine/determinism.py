"""The same bits every time on a GPU (`numerics.deterministic`): what is set in torch at first.

What CUDA may add in any order, and what becomes of it (pytorch's sources, 2.11 to 2.13):

    matrix products         cuBLAS may lend streams another workspace       CUBLAS_WORKSPACE_CONFIG
    attention, backward     flash, memory-efficient: tiles in any order     in order
                            cuDNN: not deterministic                        not chosen
    index_add_ (embedding)  atomics                                         sorted, summed by runs
    scatter_add_, gather's  atomics of integers, or of one number each      sorted
    index_put_              any of several values for a place; here is one  sorted

torch refuses an operation without a deterministic kernel; tests/ranks/test_determinism.py finds it
before a GPU does. On a CPU all are deterministic, and the setting would sort and fill memory.
On an H200 it costs 4.5 % more than cuDNN's attention (docs/guides/gpus.md).
"""

import os
from collections.abc import MutableMapping

import torch

from mpitrain.config import Numerics
from mpitrain.errors import ConfigError

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# docs.nvidia.com/cuda/cublas, results reproducibility; the first is the faster one
FITTING = (":4096:8", ":16:8")
DETERMINISM_MESSAGES = {
    True: "the same bits every time: deterministic kernels (numerics.deterministic; false may be faster)",
    False: "not the same bits every time: the fastest kernels (numerics.deterministic = false)",
}


def settle(numerics: Numerics, environment: MutableMapping[str, str] = os.environ) -> None:
    """Choose deterministic or fastest kernels, before cuBLAS is first used. Raises ConfigError."""
    deterministic = numerics.deterministic
    if deterministic and (workspace := environment.setdefault(WORKSPACE, FITTING[0])) not in FITTING:
        needed = f"products of matrices are deterministic with {' or '.join(FITTING)} only"
        change = "unset it, or set numerics.deterministic=false"
        raise ConfigError(f'{WORKSPACE} = "{workspace}": {needed}; {change}')
    # with warnings only, flash attention would stay as it is
    torch.use_deterministic_algorithms(deterministic, warn_only=False)
    # to fill it costs a pass, and nothing reads what it has not written
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)
    # parts of a product that the GPU's multiprocessors share are summed in fp32, as the CPU's are
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    # a backward is some hundred calls of this thread: to hand each to a thread of the device takes time
    torch.autograd.set_multithreading_enabled(False)

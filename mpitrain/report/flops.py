"""Model FLOPs and the peak they are divided by. The definition is printed with every run.

Per token 6 FLOPs for each weight of a matrix product (the embedding lookup is none), forward and backward, and 6 * T * D per layer
for causal attention: half of the 12 * T * D of PaLM (arXiv:2204.02311, appendix B), because half of the scores are masked.
Recomputation would not be counted.
"""

import time

import torch

from mpitrain.config import Config
from mpitrain.products import product
from mpitrain.slicing import EMBEDDING, parameters_of

DEFINITION = "model FLOPs (6 per matrix weight and token, causal attention halved, no recomputation) / peak of all ranks"

# Dense bf16 peak of the vendor's data sheet, FLOP/s.
DEVICE_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


def flops_per_token(config: Config) -> float:
    """Return the model FLOPs of one token in one training step."""
    weights = sum(spec.numel for spec in parameters_of(config) if len(spec.shape) > 1 and spec.name != EMBEDDING)
    if config.model.tied:
        weights += config.model.vocab * config.model.width
    return 6.0 * weights + 6.0 * config.model.layers * config.data.sequence * config.model.width


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak of one rank in FLOP/s and where the number is from: a data sheet, or a matrix product timed here."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for key, peak in DEVICE_PEAKS.items():
            if key in name:
                return peak, f"{name}, data sheet, bf16"
    kinds = [dtype] if dtype.itemsize > 4 else [dtype, torch.float32]  # not every CPU is faster with 16 bits
    best, kind = min((_timed(torch.ones(512, 512, dtype=each, device=device)), str(each)) for each in kinds for _ in range(5))
    return 2 * 512**3 / best, f"a {kind.removeprefix('torch.')} product of 512 x 512 matrices, timed on rank 0"


def _timed(a: torch.Tensor) -> float:
    begin = time.perf_counter()
    product(a, a).sum().item()
    return time.perf_counter() - begin

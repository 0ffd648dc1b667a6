"""The peak of a rank in FLOP/s, by which the model FLOPs of what it trains (layout/layer.py) are divided: MFU."""

import time

import torch

from mpitrain.model.linear import product

DEFINITION = "model FLOPs (6 per matrix weight and token, causal attention halved, no recomputation) / peak of all ranks"

# Dense bf16 peak of the vendor's data sheet, FLOP/s.
DEVICE_PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}


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

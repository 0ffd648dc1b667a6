"""Whether this node may have GPUs, and what a rank has of one. Light: every rank of a dry run imports it."""

import os
from typing import NamedTuple

# what a driver for GPUs makes: NVIDIA's, its Jetson's, AMD's, and that of Linux in Windows
DRIVERS_FILES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/kfd", "/dev/dxg")


class GpuShare(NamedTuple):
    """The smallest share of a GPU that a rank has. num_bytes: of its memory."""

    name: str
    num_bytes: int


def may_have_gpus() -> bool:
    """Return whether a driver for GPUs is there, which says whether torch is worth asking."""
    return any(os.path.exists(path) for path in DRIVERS_FILES)

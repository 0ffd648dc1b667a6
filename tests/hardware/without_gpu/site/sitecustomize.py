"""Every Python that run.py starts, ranks and what they start included, begins with the kernels of
the device that isn't there.
"""

import os
import sys
from pathlib import Path

if "libcuda.so.1" in os.environ.get("LD_PRELOAD", "") and "UNREAL_GPU_EMPTY" not in os.environ:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import kernels

    sys.path.pop(0)
    LIBRARY = kernels.install()

"""A checkpoint for other versions of h5py.

Who has only numpy and h5py reads it, who has mpitrain writes it, too.

python other_h5py.py write FOLDER   step 1, of two writers
python other_h5py.py read FILE ...  what h5py sees, as JSON by file and path; every dataset is read,
                                    every attribute decoded
"""

import hashlib
import json
import os
import sys

import h5py
import numpy as np


def arrays():
    """Return arrays of every dtype and kind of shape that a checkpoint holds; and of a group with
    many names.
    """
    from mpitrain.checkpoint.dtypes import BF16, NAMES

    dice = np.random.default_rng(1)
    found = {f"parameters/blocks.{i}.weight": dice.standard_normal((2, 3), np.float32) for i in range(60)}
    for dtype, name in NAMES.items():
        bits = dice.integers(0, 64, 24, np.uint16) << 8 if dtype == BF16 else None
        found[f"adam/m/{name}"] = (
            bits.view(BF16) if bits is not None else np.arange(24).astype(dtype)
        ).reshape(6, 4)
    found["parameters/deep"] = dice.standard_normal((3, 2, 3, 4))
    found["parameters/large"] = dice.standard_normal((300, 1000), np.float32)
    return found | {"parameters/none": np.zeros((0, 4), np.float32), "adam/count": np.array(7)}


def write(folder):
    """Commit the arrays as step 1, the larger ones in parts of runs of elements, as ZeRO divides them."""
    from pathlib import Path

    from checkpoints import save

    save(Path(folder), 1, arrays())


def as_seen(value):
    """Return an array as h5py gives it: bf16 as float32."""
    if value.dtype.names == ("bfloat16",):
        return (np.ascontiguousarray(value).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return value


def summary(value):
    value = np.asarray(value)
    return [
        str(value.dtype),
        list(value.shape),
        hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest(),
    ]


def read(path):
    """Return a summary of every dataset in a file."""
    found = {}

    def see(name, item):
        if isinstance(item, h5py.Dataset):
            sources = item.virtual_sources() if item.is_virtual else []
            if any(os.path.isabs(source.file_name) for source in sources):
                raise ValueError(f"{name}: {sources}")
            found[name] = summary(item[()])

    with h5py.File(path, "r") as file:
        file.visititems(see)
        json.dumps({name: str(value) for name, value in file.attrs.items()})
    return found


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2])
    else:
        sys.stdout.write(json.dumps({path: read(path) for path in sys.argv[2:]}))

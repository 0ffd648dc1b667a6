"""Read a routing trace (experts.replay), which plan/routing.py describes.

Apart from it for what it imports: a rank without a trace needs no zipfile.
"""

import io
import struct
import zipfile
import zlib

import numpy as np

from mpitrain.errors import ConfigError
from mpitrain.inputs import read_file, shown
from mpitrain.plan.declared.parameters import Spec
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.routing import FIRST, RoutingTrace

MOST_BYTES = 1 << 30
# what zipfile and numpy raise for a file of another kind
NOT_A_TRACE = (
    *(ValueError, KeyError, EOFError, MemoryError, RuntimeError),
    *(zipfile.BadZipFile, struct.error, zlib.error),
)


def read(config: ResolvedConfig, loads: list[Spec]) -> RoutingTrace:
    """Read experts.replay. Raises ConfigError unless it has the experts of every token for all `loads`."""
    path = config.experts.replay
    name = f'experts.replay = "{shown(path)}"'
    try:
        experts, first = _unpacked(read_file(path, MOST_BYTES), [spec.name for spec in loads], name)
    except OSError as error:
        why = error.strerror or "not a routing trace"
        raise ConfigError(f"{name} can't be read: {why}; give a file that run.routing has made") from None
    except NOT_A_TRACE:
        raise ConfigError(f"{name}: not a routing trace; give a file that run.routing has made") from None
    for block, array in experts.items():
        _require_experts(config, array, f"{name}: found", block)
    if first.dtype.kind not in "iu" or first.shape or first < 1:
        raise ConfigError(
            f"{name}: found {FIRST} of shape {list(first.shape)} and type {first.dtype}; needed "
            "one step, from 1 on"
        )
    return RoutingTrace(experts, int(first))


def _unpacked(content: bytes, blocks: list[str], name: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    packed = io.BytesIO(content)
    if sum(member.file_size for member in zipfile.ZipFile(packed).infolist()) > MOST_BYTES:
        raise ConfigError(
            f"{name}: found more than {MOST_BYTES >> 30} GiB, packed; needed a trace of fewer "
            "steps (run.routing)"
        )
    with np.load(packed, allow_pickle=False) as file:
        missing = next((block for block in blocks if block not in file.files), None)
        if missing:
            raise ConfigError(
                f"{name}: found nothing of {missing}; replay what a run with the same blocks has "
                "recorded (run.routing)"
            )
        first = file[FIRST] if FIRST in file.files else np.array(1)
        return {block: file[block] for block in blocks}, first


def _require_experts(config: ResolvedConfig, array: np.ndarray, source: str, block: str) -> None:
    """Raise ConfigError unless an array has `active` experts, each once, for every token of each step."""
    count = config.experts.count
    needed = (config.batch.global_, config.data.sequence, config.experts.active)
    if array.dtype.kind not in "iu" or array.ndim != 4 or array.shape[1:] != needed or not len(array):
        raise ConfigError(
            f"{source} {block} of shape {list(array.shape)}; needed [steps, batch.global, "
            f"data.sequence, experts.active] = [steps, {', '.join(map(str, needed))}]"
        )
    ordered = np.sort(array, axis=-1)
    if ordered.min() < 0 or ordered.max() >= count or (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ConfigError(
            f"{source} in {block} an expert twice, or none of 0 to {count - 1}; record it again"
        )

"""numpy arrays and torch tensors alike: flat views, bytes for the wire, and sums in a fixed order.

torch is never imported: who hands in a tensor has done so, and a dry run over 512 ranks must not.

Sums are taken element by element, neighbours on the axis in pairs, 16-bit floats in fp32: bits
depend on the values and their order only.
"""

import sys
from typing import Any

import numpy as np

from mpitrain.comm.base.wire import ROOM
from mpitrain.errors import DtypeError

BLOCK = 1 << 16  # elements summed at a time: 256 KiB of fp32 stay in the L2 cache over all parts
# on a device, where each costs launches: 64 MiB of fp32, for the sum and each level of pairs
DEVICE_BLOCK = 1 << 24

ALL = slice(None)  # of a buffer
NOTHING = slice(0, 0)

Array = Any  # a numpy array or a torch tensor

SUMMED = (  # dtypes of tensors
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint64", "uint32",
    "uint16", "uint8",
)  # fmt: skip
MOVED = (
    *SUMMED, "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
# torch can't add what stands first
SIGNED = {"torch.uint64": "int64", "torch.uint32": "int32", "torch.uint16": "int16"}


def is_tensor(x: Array) -> bool:
    """Tell whether `x` is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def on_device(x: Array) -> bool:
    """Tell whether `x` lies in GPU memory."""
    return is_tensor(x) and x.is_cuda


def flat(x: Array, *, written: bool = False, summed: bool = False) -> Array:
    """Return `x` as a one-dimensional view of the same memory.

    written: the operation writes it.  summed: it adds elements.
    Raises DtypeError if `x` can't be sent as its bytes, or that can't be done: alike on all ranks
    whose buffers are alike.
    """
    if is_tensor(x):
        _require_plain_tensor(x, summed)
        # view(-1) keeps odd strides of arrays of length 0 and 1
        return x.detach().as_strided((x.numel(),), (1,))
    _require_plain_array(x, summed)
    if written and not x.flags.writeable:
        raise DtypeError(f"an array of shape {x.shape} is read-only, and is to be written; pass x.copy()")
    return x.reshape(-1)


def _require_plain_tensor(x: Array, summed: bool) -> None:
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in MOVED:
        raise DtypeError(f"a tensor of {dtype} can't be sent; needed one of {', '.join(MOVED)}")
    if summed and dtype not in SUMMED:
        raise DtypeError(f"a tensor of {dtype} can't be summed; needed one of {', '.join(SUMMED)}")
    torch = sys.modules["torch"]
    if x.layout != torch.strided or type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        raise DtypeError(
            f"a {type(x).__name__} of layout {x.layout} can't be sent; needed a plain dense tensor"
        )
    if x.is_neg():
        raise DtypeError("a tensor that is a negated view can't be sent; pass x.resolve_neg()")
    if not x.is_contiguous():
        raise DtypeError(
            f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous; pass "
            "x.contiguous()"
        )


def require_memory(x: Array) -> None:
    """Raise DtypeError unless `x` has memory that can be sent; a rehearsal has tensors without."""
    if is_tensor(x) and x.device.type not in ("cpu", "cuda"):
        raise DtypeError(
            f"a tensor on device {x.device.type} can't be sent; needed one in host memory or on a GPU"
        )


def _require_plain_array(x: Array, summed: bool) -> None:
    if not isinstance(x, np.ndarray):
        raise DtypeError(f"found {type(x).__name__}, needed a numpy array or a torch tensor")
    if type(x) not in (np.ndarray, np.memmap):
        masked = "; its mask would be lost" * isinstance(x, np.ma.MaskedArray)
        raise DtypeError(
            f"a {type(x).__name__} can't be sent{masked}; pass np.asarray(x), or x.filled(...) of a masked "
            "one"
        )
    if x.dtype.kind not in "fiub":
        raise DtypeError(f"dtype {x.dtype} can't be sent; use a float or an integer type")
    if summed and x.dtype.kind == "b":
        raise DtypeError("an array of bool can't be summed; use an integer type")
    if not x.dtype.isnative:
        raise DtypeError(
            f"dtype {x.dtype.str} has its bytes in another order than this machine; pass "
            "x.astype(x.dtype.newbyteorder('='))"
        )
    if not x.flags.c_contiguous:
        raise DtypeError(
            f"an array of shape {x.shape} and strides {x.strides} is not contiguous; pass "
            "np.ascontiguousarray(x)"
        )


def overlap(x: Array, y: Array) -> bool:
    """Tell whether two flat arrays share memory."""
    begin = address(x)
    other = address(y)
    x_bytes: int = x.nbytes
    y_bytes: int = y.nbytes
    return begin < other + y_bytes and other < begin + x_bytes and x_bytes > 0 and y_bytes > 0


def same_kind(x: Array, y: Array) -> None:
    """Raise DtypeError unless both arrays have one dtype and live in one kind of memory."""
    if is_tensor(x) != is_tensor(y) or x.dtype != y.dtype or on_device(x) != on_device(y):
        raise DtypeError(f"found {x.dtype} and {y.dtype}: both buffers need one dtype, library and device")


def raw(x: Array) -> Array:
    """Return the bytes of a flat array, sharing its memory, as MPI takes them."""
    if is_tensor(x):
        as_bytes = x.view(sys.modules["torch"].uint8)
        return as_bytes if x.is_cuda else as_bytes.numpy()
    return x.view(np.uint8)


def empty_like(x: Array, length: int) -> Array:
    """Return an uninitialised flat array of `length` elements with the dtype and device of `x`."""
    return x.new_empty(length) if is_tensor(x) else np.empty(length, x.dtype)


def address(x: Array) -> int:
    """Return where the memory of `x` begins."""
    begin: int = x.data_ptr() if is_tensor(x) else x.ctypes.data
    return begin


def typed_like(x: Array, memory: np.ndarray) -> Array:
    """Return host `memory` (bytes) as a flat array of the dtype and library of `x`, without a copy."""
    if not is_tensor(x):
        return memory.view(x.dtype)
    return sys.modules["torch"].from_numpy(memory).view(x.dtype) if len(memory) else x.new_empty(0)


def is_narrow(x: Array) -> bool:
    """Tell whether `x` holds 16-bit floats."""
    return x.dtype.itemsize == 2 and "float" in str(x.dtype)


def widened_like(x: Array, length: int) -> Array:
    """Return an uninitialised flat array of `length` fp32 elements on the device of `x`."""
    return (
        x.new_empty(length, dtype=sys.modules["torch"].float32)
        if is_tensor(x)
        else np.empty(length, np.float32)
    )


class ScratchTurn:
    """Whether an operation may take scratch memory: those before it are over, or leave room.

    Turns are in the order in which operations are started, the same on all ranks of an axis. So no
    rank waits for ever: what is foremost here needs nothing of those after it.
    """

    def __init__(self, num_bytes: int, before: list["ScratchTurn"], room: int):
        self.num_bytes = num_bytes
        self.over = False
        self._before = before
        self._room = room

    def __call__(self) -> bool:
        self._before = [turn for turn in self._before if not turn.over]
        return not self._before or sum(turn.num_bytes for turn in self._before) + self.num_bytes <= self._room


class Scratch:
    """Host memory lent to operations and used again: fresh pages cost more than the sum they are used for."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []
        self._lent_bytes = 0
        self._turns: list[ScratchTurn] = []
        self.most_bytes = 0  # that were lent, or kept for the next operation, at once

    def take_turn(self, num_bytes: int) -> ScratchTurn:
        """Return the turn of an operation that takes so many bytes at once, when it is called."""
        self._turns = [turn for turn in self._turns if not turn.over]
        turn = ScratchTurn(num_bytes, list(self._turns), ROOM)
        self._turns.append(turn)
        return turn

    def lend(self, x: Array, length: int) -> tuple[Array, np.ndarray | None]:
        """Return a flat array of `length` elements like `x`, and the memory to hand to give_back()."""
        if on_device(x):
            return empty_like(x, length), None
        num_bytes = length * x.dtype.itemsize
        fitting = [i for i, memory in enumerate(self._free) if len(memory) >= num_bytes]
        memory = self._free.pop(fitting[0]) if fitting else np.empty(num_bytes, np.uint8)
        self._lent_bytes += len(memory)
        self.most_bytes = max(self.most_bytes, self._lent_bytes + sum(map(len, self._free)))
        return typed_like(x, memory[:num_bytes]), memory

    def give_back(self, memory: np.ndarray | None) -> None:
        """Take memory back that nobody reads any more; the two largest pieces are kept."""
        if memory is not None:
            self._lent_bytes -= len(memory)
            self._free = sorted([*self._free, memory], key=len)[-2:]


def copy(source: Array, target: Array) -> None:
    """Copy `source` over `target`; nothing happens if they are the same memory."""
    if address(source) == address(target):
        return
    if is_tensor(target):
        target.copy_(source)
    else:
        np.copyto(target, source)


def sum_in_order(parts: list[Array], out: Array) -> None:
    """Write the sum of `parts` to `out`, neighbours in pairs: (0+1)+(2+3), then fours.

    So a sum over an axis has the bits of one inside groups of 2**k neighbours, then over the
    groups.
    parts, out: [P] each, one dtype; `out` may be a part. 16-bit floats are added in fp32 and
    rounded once, at the end; or not, if `out` is fp32.
    """
    parts = [_addable(part) for part in parts]
    out = _addable(out)
    narrow = is_narrow(parts[0])
    if len(parts) == 1 and parts[0].dtype == out.dtype:
        return copy(parts[0], out)
    if len(parts) == 2 and not narrow:
        return _add(parts[0], parts[1], out)
    block = DEVICE_BLOCK if on_device(out) else BLOCK
    for begin in range(0, len(out), block):
        _round_to(
            _sum_of_pairs([part[begin : begin + block] for part in parts], narrow), out[begin : begin + block]
        )
    return None


def _addable(x: Array) -> Array:
    """Return `x`, or the same bits as signed integers: sums modulo 2**n are the same."""
    signed = SIGNED.get(str(x.dtype)) if is_tensor(x) else None
    return x if signed is None else x.view(getattr(sys.modules["torch"], signed))


def _sum_of_pairs(parts: list[Array], narrow: bool) -> Array:
    """Return, in memory of its own, the sum of the first 2**k parts plus the sum of the rest."""
    if len(parts) == 1:
        return _widened(parts[0], narrow)
    half = 1 << (len(parts) - 1).bit_length() - 1
    total = _sum_of_pairs(parts[:half], narrow)
    total += parts[half] if len(parts) == half + 1 and not narrow else _sum_of_pairs(parts[half:], narrow)
    return total


def _add(a: Array, b: Array, out: Array) -> None:
    add = sys.modules["torch"].add if is_tensor(out) else np.add
    add(a, b, out=out)


def _widened(x: Array, narrow: bool) -> Array:
    """Return a private copy of `x`, in fp32 if it is a 16-bit float."""
    if is_tensor(x):
        return x.float() if narrow else x.clone()
    return x.astype(np.float32) if narrow else x.copy()


def _round_to(total: Array, out: Array) -> None:
    if is_tensor(out):
        out.copy_(total)
    else:
        out[...] = total.astype(out.dtype)

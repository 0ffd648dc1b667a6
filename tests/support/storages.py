"""All memory that tensors take, seen at every operation of torch.

What a prediction of transients is held against.
"""

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """Counts the bytes of the storages that were made under it and are still there.

    peak: the most of them at once.
    """

    def __init__(self):
        super().__init__()
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import torch

        before = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in before:
                storage = x.untyped_storage()
                self._there[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.now)
        return made

    @property
    def now(self) -> int:
        """Bytes of those that are there."""
        for key in [key for key, (storage, _) in self._there.items() if storage.expired()]:
            del self._there[key]
        return sum(num_bytes for _, num_bytes in self._there.values())

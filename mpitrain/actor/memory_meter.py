"""What microbatches leave in memory between their forward and their backward, counted while a step runs.

Counted are the storages of what autograd has saved and of what stages keep, each once, but not on
the host; of integers, which may be cut from the step's batch, only the part that is kept.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from mpitrain.actor.stage import Stage
from mpitrain.model.kv_history import KeysValues
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import WeightGradients


class _Saved:
    """What autograd has saved, as long as it needs it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor.detach()  # an output would hold the graph that holds it


class Watch:
    """The most bytes that the stages of a rank have held at once. constants: aren't counted.

    peak: between instructions. inside: within them, too, where blocks are recomputed.
    """

    def __init__(self, stages: Iterable[Stage], constants: Iterable[torch.Tensor]):
        self._stages = list(stages)
        self._saved = weakref.WeakSet()
        self.peak = 0
        self.inside = 0
        self._there = {_address(x) for x in constants}
        self._recomputes = any(stage.plan.groups for stage in self._stages)

    def watching(self) -> saved_tensors_hooks:
        """Note what autograd saves within the block."""
        return saved_tensors_hooks(self._note, lambda saved: saved.tensor)

    def _note(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._saved.add(saved)
        return saved

    def look(self) -> None:
        """Count what is held now, between two instructions."""
        self.peak = max(self.peak, self._held())
        self.inside = max(self.inside, self.peak)

    def look_inside(self) -> None:
        """Count what is held between two items of a block: the most only with recomputation."""
        if self._recomputes:
            self.inside = max(self.inside, self._held())

    def _held(self) -> int:
        held = [saved.tensor for saved in self._saved]
        for stage in self._stages:
            held += _tensors_in([stage.stashes, stage.inputs, stage.contexts.histories])
            held += _tensors_in(stage.deferred_weight_gradients)
            held += stage.offload_store.tensors() if stage.offload_store is not None else ()
        sizes = {_address(x): x.untyped_storage().nbytes() for x in held if x.is_floating_point()}
        numbers = {x.data_ptr(): x.nbytes for x in held if not x.is_floating_point()}
        counted = (size for address, size in sizes.items() if address not in self._there)
        return sum(counted) + sum(numbers.values())


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors_in(kept: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a stage keeps."""
    match kept:
        case torch.Tensor():
            yield kept
        case dict():
            yield from _tensors_in(list(kept.values()))
        case list() | tuple():
            for item in kept:
                yield from _tensors_in(item)
        case KeysValues():
            yield from _tensors_in([kept.tensors, kept.grads])
        case Context():
            yield from _tensors_in([kept.visible])
        case WeightGradients():
            yield from kept.tensors()

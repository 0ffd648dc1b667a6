"""What a checkpoint holds of an actor: weights and moments, box by box, and the loss scale."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from mpitrain.actor.actor import Actor
from mpitrain.checkpoint import save
from mpitrain.checkpoint.boxes import Box, run_boxes
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.tensors import to_array, to_tensor
from mpitrain.layout.parameters import Spec
from mpitrain.parallel.zero.shards import Piece


def has_a_shard(actor: Actor) -> bool:
    """Tell whether this rank is the first of those that have its part of a domain's state: then it writes that part."""
    return any(sharding.first for sharding in actor.shardings.values())


def write(folder: Path, number: int, actor: Actor) -> None:
    """Write shard `number`: what this rank counts of weights and moments."""
    parts = defaultdict(list)
    for name, spec, box, x in _state(actor, actor.gradients.counted):
        parts[name].append((to_array(x.view(box.shape)), save.Extent(spec.whole, _offset(spec, box))))
    save.write_shard(folder, number, parts)


def read(saved: Checkpoint, actor: Actor) -> None:
    """Read this rank's part of weights and moments, and the loss scale. Raises CheckpointError for what isn't there."""
    for name, spec, box, x in _state(actor, actor.gradients.pieces):
        saved.require({name: (to_array(x).dtype, spec.whole)})
        where = tuple(slice(begin, begin + length) for begin, length in zip(_offset(spec, box), box.shape))
        x.copy_(to_tensor(saved.read(name, where)).flatten())
    actor.loss_scale.state = saved.meta["loss_scale"]


def not_finite(actor: Actor) -> str | None:
    """Return the name of the first parameter of this rank that has weights that aren't finite."""
    return next((piece.spec.name for piece in actor.gradients.pieces if not piece.weight.isfinite().all()), None)


def _state(actor: Actor, pieces: Sequence[Piece]) -> Iterator[tuple[str, Spec, Box, torch.Tensor]]:
    """Yield (name in the checkpoint, parameter, box of its box here, flat tensor) of weights and moments, box by box."""
    for piece in pieces:
        tensors = [("parameters", piece.weight), *actor.optimizer.moments(piece)]
        for box, here in run_boxes(piece.spec.shape, piece.begin, piece.end):
            yield from ((f"{what}/{piece.spec.name}", piece.spec, box, x[here]) for what, x in tensors)


def _offset(spec: Spec, box: Box) -> tuple[int, ...]:
    """Return where a box of this rank's box begins in the whole parameter."""
    return tuple(a + b for a, b in zip(spec.offset, box.start))

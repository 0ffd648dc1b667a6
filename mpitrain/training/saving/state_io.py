"""What a checkpoint holds of an actor: weights and moments, box by box, and the loss scale.

A copy of a run may have another batch, sequence length or precision than its steps were saved with.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from mpitrain.actor.actor import Actor
from mpitrain.checkpoint import save
from mpitrain.checkpoint.boxes import Box, run_boxes
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.tensors import to_array, to_tensor
from mpitrain.config import Config
from mpitrain.errors import CheckpointError
from mpitrain.inputs import listed, shown
from mpitrain.kernels.streams import AtOnce, streams_of
from mpitrain.parallel.zero.shards import ParameterShard
from mpitrain.plan.declared.parameters import Spec
from mpitrain.weights.matching import FURTHER

Held = tuple[str, ParameterShard, torch.Tensor]
Parts = Mapping[str, Sequence[tuple[np.ndarray, save.Extent]]]  # of each array, by name
PARAMETERS = "parameters"
PIECE_BYTES = 1 << 18
AT_ONCE = 1 << 20  # elements that are looked at together: a thread that looks needs little memory
MOST_SEQUENCES = 1 << 53


def has_a_shard(actor: Actor) -> bool:
    """Tell whether this rank is the first with its part of a domain's state: then it writes it."""
    return any(zero_group.first for zero_group in actor.zero_groups.values())


class Snapshot:
    """What this rank counts of an actor's weights and moments, as it was when it was last taken.

    copied: into host memory of this object's own, which every snapshot uses again; else it is good
    until the next update. sizes: bytes of each tensor.  num_bytes, own_bytes: of all of them.
    targets: memory of the copies piece by piece, in the order in which it is filled.
    allocate: gives that memory, of a number of elements of a dtype; default: pinned for a GPU.
    pieces: of which; default: what this rank counts.
    """

    def __init__(
        self,
        actor: Actor,
        copied: bool,
        allocate: Callable[[int, torch.dtype], torch.Tensor] | None = None,
        pieces: Sequence[ParameterShard] | None = None,
    ):
        streams = streams_of(actor.site.device)
        allocate = allocate or streams.on_host
        self._actor = actor
        self._pieces = actor.gradients.counted if pieces is None else pieces
        self._compute = streams.compute
        self.copied = copied
        live = self._live()
        held = live if copied else ()
        self._copies = [(what, piece, allocate(len(x), x.dtype).zero_()) for what, piece, x in held]
        self.targets = list(_pieces([copy for _, _, copy in self._copies]))
        self.sizes = [x.nbytes for _, _, x in live]
        self.num_bytes = self.own_bytes = sum(self.sizes)

    def take(self, each: Callable[[], object] | None = None) -> None:
        """Have everything as it is now. The only moment for which training stops.

        each: called when the next of `targets` is filled; on a CPU while caches have it.
        """
        if not self.copied:
            return
        live = [x for _, _, x in self._live()]
        if each and isinstance(self._compute, AtOnce):
            for target, source in zip(self.targets, _pieces(live), strict=True):
                target[:] = source
                each()
            return
        for (_, _, copy), x in zip(self._copies, live, strict=True):
            self._compute.copy(copy, x)
        self._compute.record().synchronize()
        if each:
            for _ in self.targets:
                each()

    @cached_property
    def _copy_parts(self) -> Parts:
        return _parts(self._copies)

    def parts(self) -> Parts:
        """Return what was taken, as checkpoint.save takes it, in memory of this object or actor."""
        return self._copy_parts if self.copied else _parts(self._live())

    def _live(self) -> list[Held]:
        return list(_tensors(self._actor, self._pieces))


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    """Yield the memory of some flat tensors of the host, in pieces that fit into a core's cache."""
    for x in tensors:
        content = x.view(torch.uint8).numpy().data
        for begin in range(0, len(content), PIECE_BYTES):
            yield content[begin : begin + PIECE_BYTES]


def _parts(held: Sequence[Held]) -> Parts:
    parts = defaultdict(list)
    for name, spec, box, x in _boxes(held):
        extent = save.Extent(spec.whole, _offset(spec, box))
        parts[name].append((to_array(x).reshape(box.shape), extent))
    return parts


def read(saved: Checkpoint, actor: Actor) -> None:
    """Read this rank's part of weights and moments, and the loss scale.

    Raises CheckpointError for what isn't there, and for weights that nobody would read.
    """
    _require_same_state(saved, actor)
    for name, spec, box, x in _boxes(_tensors(actor, actor.gradients.pieces)):
        saved.require({name: (to_array(x).dtype, spec.whole)})
        where = tuple(slice(begin, begin + length) for begin, length in zip(_offset(spec, box), box.shape))
        x.copy_(to_tensor(saved.read(name, where)).flatten())
    actor.loss_scale.resume(saved.meta["loss_scale"], compute_of(saved, actor.config))


def _require_same_state(saved: Checkpoint, actor: Actor) -> None:
    """Raise CheckpointError for other weights, but model.mtp's, or another optimiser's moments."""
    stored = set(saved.names())
    own = {spec.name for spec in actor.plan.parameters()}
    weights = {name.partition("/")[2] for name in stored if name.startswith(f"{PARAMETERS}/")}
    if unread := sorted(name for name in weights - own if not name.startswith(FURTHER)):
        raise CheckpointError(
            f"{shown(saved.path)} has arrays that this model lacks: {listed(unread, 2)}; put back the keys "
            "of the model that it was trained with"
        )
    needed = {f"{what}/{piece.spec.name}" for what, piece, _ in _tensors(actor, actor.gradients.pieces)}
    if lost := sorted(needed - stored):
        raise CheckpointError(
            f"{shown(saved.path)} has no {listed(lost, 2)}: it was trained with another optimizer.name or "
            "optimizer.frozen; put that back, or begin another run with its weights, by model.init"
        )


def not_finite(parts: Parts) -> str | None:
    """Return the name of the first parameter with weights that aren't finite, of parts of a snapshot."""
    for name, held in parts.items():
        what, _, parameter = name.partition("/")
        if what == PARAMETERS and not all(_finite(array.reshape(-1)) for array, _ in held):
            return parameter
    return None


def _finite(x: np.ndarray) -> bool:
    return all(np.isfinite(x[at : at + AT_ONCE]).all() for at in range(0, len(x), AT_ONCE))


def _tensors(actor: Actor, pieces: Sequence[ParameterShard]) -> Iterator[Held]:
    """Yield (what it is, of which piece, flat tensor) of weights and moments."""
    for piece in pieces:
        yield PARAMETERS, piece, piece.weight
        yield from ((what, piece, x) for what, x in actor.optimizer.moments(piece))


def _boxes(held: Iterable[Held]) -> Iterator[tuple[str, Spec, Box, torch.Tensor]]:
    """Yield (name in the checkpoint, parameter, box of its box here, flat tensor), box by box."""
    for what, piece, x in held:
        for box, here in run_boxes(piece.spec.shape, piece.begin, piece.end):
            yield f"{what}/{piece.spec.name}", piece.spec, box, x[here]


def _offset(spec: Spec, box: Box) -> tuple[int, ...]:
    """Return where a box of this rank's box begins in the whole parameter."""
    return tuple(a + b for a, b in zip(spec.offset, box.start))


def sequences_read(saved: Checkpoint, config: Config) -> int:
    """Return the place in the data's order of the next sequence, counted in sequences of `config`.

    Another data.sequence rounds it up, so that no token is counted twice. Raises CheckpointError
    for a place that no run reaches.
    """
    count = saved.meta.get("sequences")
    if count is None:  # of an older version
        skipped = (saved.meta.get("spikes") or {}).get("batches_skipped", 0)
        count = (saved.meta["step"] + skipped) * _saved(saved, "batch.global", config.batch.global_)
    num_tokens = count * _saved(saved, "data.sequence", config.data.sequence)
    place = -(-num_tokens // config.data.sequence)
    if place > MOST_SEQUENCES:
        what = f"{shown(saved.path)}: found {place:,} sequences read"
        raise CheckpointError(f"{what}; it is damaged, remove it")
    return place


def compute_of(saved: Checkpoint, config: Config) -> str:
    """Return the precision.compute that a step was saved with."""
    return str(saved.about.settings.get("precision.compute", config.precision.compute))


def _saved(saved: Checkpoint, key: str, otherwise: int) -> int:
    """Return a count of the configuration in a step; `otherwise` if it doesn't say it."""
    value = saved.about.settings.get(key)
    return value if type(value) is int and value > 0 else otherwise

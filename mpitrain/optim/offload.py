"""`memory.offload = "optimizer"`: master weights and moments are in host memory, and are updated
there (ZeRO-Offload, arXiv:2101.06840).

    device  gradients, summed, scaled  all copied to the host, in the order of the loads  weights, narrow
                        |  ^
    host  +--> load 0 | load 1 | load 2 ...  each updated while the next ones arrive ---+

Only what is copied is different: the weights are the same bits as without. On a CPU host and device
are one, and the copies, which are made all the same, only cost time; so that every machine can test
it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpitrain.kernels.streams import streams_of
from mpitrain.parallel.zero.shards import ParameterShard

if TYPE_CHECKING:
    from mpitrain.optim.protocol import Optimizer

LOAD = 2**22  # elements: a GPU sends them in a millisecond, and a core updates them in ten


class Load(NamedTuple):
    """Pieces that are updated together. sent: their gradients on the device and where they go."""

    optimizer: "Optimizer"
    weights: list[torch.Tensor]
    sent: list[tuple[torch.Tensor, torch.Tensor]]


class Offloaded:
    """The optimisers of all loads, as one.

    make: makes one of pieces whose weights and gradients are in host memory.
    whole: everything is one load, for an optimiser that takes its pieces in an order of its own.
    cores: that compute an update, where a device computes the rest.
    """

    def __init__(
        self,
        pieces: Sequence[ParameterShard],
        device: torch.device,
        make: Callable[[list[ParameterShard]], "Optimizer"],
        *,
        whole: bool,
        cores: int = 1,
    ):
        self._threads = cores if device.type == "cuda" else torch.get_num_threads()
        self._streams = streams_of(device)
        self._there = self._streams.further()
        runs = [list(pieces)] if whole else _runs(pieces)
        self._loads = [self._load(run, make) for run in runs]
        self._of = {weight: load.optimizer for load in self._loads for weight in load.weights}

    def _load(
        self, pieces: list[ParameterShard], make: Callable[[list[ParameterShard]], "Optimizer"]
    ) -> Load:
        arriving = [
            piece._replace(grad=self._streams.on_host(len(piece.grad), piece.grad.dtype)) for piece in pieces
        ]
        sent = [(piece.grad, there.grad) for piece, there in zip(pieces, arriving)]
        return Load(make(arriving), [piece.weight for piece in pieces], sent)

    @property
    def num_bytes(self) -> int:
        """Of the gradients in host memory."""
        return sum(there.nbytes for load in self._loads for _, there in load.sent)

    def step(self, lr: float) -> None:
        """Update the weights of the pieces, in host memory, from their gradients on the device.

        At its end these are copied, and all is over that was queued on the device before.
        """
        self._there.wait(self._streams.compute.record())
        arrivals = []
        for load in self._loads:
            for grad, there in load.sent:
                self._there.copy(there, grad)  # beside what is computed
            arrivals.append(self._there.record())
        with torch_threads(self._threads):
            for load, arrival in zip(self._loads, arrivals):
                arrival.synchronize()
                load.optimizer.step(lr)

    def moments(self, piece: ParameterShard) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._of[piece.weight].moments(piece)

    def set_step(self, num_updates: int) -> None:
        for load in self._loads:
            load.optimizer.set_step(num_updates)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch compute by so many threads meanwhile."""
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


def _runs(pieces: Sequence[ParameterShard]) -> list[list[ParameterShard]]:
    """Divide pieces into runs of about LOAD elements."""
    runs: list[list[ParameterShard]] = []
    for piece in pieces:
        if not runs or sum(len(p.weight) for p in runs[-1]) >= LOAD:
            runs.append([])
        runs[-1].append(piece)
    return runs

"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): matrices move along the orthogonal
matrix nearest to their momentum.

    momentum <- beta momentum + (1 - beta) gradient          on the parts that a rank has
    update    = (1 - beta) gradient + beta momentum          the same (Nesterov); without: the
                                                             momentum, before it is rounded
    result    = Newton-Schulz iterations of the update       on whole matrices, each by one rank
                                                             (optim/matrices.py)
    weights  <- (1 - lr decay) weights - lr 0.2 sqrt(max(rows, columns)) result

The factor makes the root mean square of the steps what AdamW's typically is, so that one learning
rate and one decay serve both (Moonlight, arXiv:2502.16982, section 2.2). Embedding, head and norms
are AdamW's. With parallel.zero = 0 every data-parallel rank orthogonalises all matrices of its
stages; from 1 on they are divided.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from mpitrain.config import OptimizerTable
from mpitrain.optim.optimizers import adamw
from mpitrain.plan.declared.optimizers import OptimizerKind
from mpitrain.plan.declared.work import PartWork, Product

if TYPE_CHECKING:
    import torch

    from mpitrain.comm.progress import Pending
    from mpitrain.optim.matrices import MatrixRound
    from mpitrain.optim.protocol import OptimizerParts
    from mpitrain.parallel.zero.shards import ParameterShard

AHEAD = 8  # rounds under way: enough to keep the network busy, and no second copy of all matrices


class Muon:
    """The optimiser of one rank: Muon for hidden matrices, AdamW for the rest. parts.rounds: who
    orthogonalises what, on parts.device.
    """

    def __init__(self, parts: "OptimizerParts"):
        from mpitrain.optim.moments import Moments  # torch

        self._settings = settings = parts.settings
        self._rounds = parts.rounds
        self._device = parts.device
        self._num_updates = 0
        # as in optim/matrices.py: no optimiser is given frozen ones
        hidden = [piece for piece in parts.pieces if piece.spec.group == "matrix"]
        self._pieces = {piece.spec.name: piece for piece in hidden}
        narrow = settings.moments == "bf16"
        names = parts.moments("matrix")
        self._momentum = Moments(hidden, names, narrow=narrow, seed=parts.seed)
        others = [piece for piece in parts.pieces if piece not in self._momentum]
        self._adamw = adamw.build(replace(parts, pieces=others))

    def step(self, lr: float) -> None:
        """Update the weights of the pieces. Collective over the axis of the rounds: one order on all.

        Parts are on their way while AdamW and then the round before are computed; rounds arrive in
        the order they are started in.
        """
        starting = (
            (matrix_round, matrix_round.gather({name: self._update(name) for name in matrix_round.held}))
            for matrix_round in self._rounds
        )
        gathering = deque(islice(starting, AHEAD))
        returning: deque[tuple[MatrixRound, Pending]] = deque()
        self._adamw.step(lr)
        while gathering:
            matrix_round, pending = gathering.popleft()
            gathering.extend(islice(starting, 1))
            matrix = matrix_round.whole(pending.wait())
            result = None if matrix is None else self._orthogonal(matrix, matrix_round.poll)
            returning.append((matrix_round, matrix_round.scatter(result)))
            if len(returning) > AHEAD:
                self._apply(*returning.popleft(), lr)
        for matrix_round, pending in returning:
            self._apply(matrix_round, pending, lr)
        self._num_updates += 1

    def _update(self, name: str) -> "torch.Tensor":
        """Take the gradient of a part of a matrix into its momentum; return what is to be orthogonalised."""
        import torch

        beta = self._settings.momentum
        updates = []
        for _, (grad,), ((momentum,),) in self._momentum.opened(self._num_updates, [self._pieces[name]]):
            momentum.lerp_(grad, 1 - beta)
            updates.append(grad.lerp(momentum, beta) if self._settings.nesterov else momentum)
        return updates[0] if len(updates) == 1 else torch.cat(updates)

    def _orthogonal(self, matrix: "torch.Tensor", poll: Callable[[], None]) -> "torch.Tensor":
        from mpitrain.optim.newton_schulz import newton_schulz  # torch

        result = newton_schulz(matrix.to(self._device), self._settings.ns_steps, poll)
        return result.mul_(0.2 * math.sqrt(max(matrix.shape))).to(matrix.device)

    def _apply(self, matrix_round: "MatrixRound", pending: "Pending", lr: float) -> None:
        for name, result in matrix_round.parts(pending.wait()).items():
            self._pieces[name].weight.mul_(1 - lr * self._settings.decay).sub_(result, alpha=lr)

    def moments(self, piece: "ParameterShard") -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield ("muon/momentum", tensor) of a part of a hidden matrix; of others AdamW's moments."""
        own = self._momentum.of(piece) if piece in self._momentum else self._adamw.moments(piece)
        yield from own

    def set_step(self, num_updates: int) -> None:
        """Set the number of updates so far: for bias corrections, and the rounding of moments."""
        self._num_updates = num_updates
        self._adamw.set_step(num_updates)


def _moments(settings: OptimizerTable, group: str) -> tuple[str, ...]:
    return ("muon/momentum",) if group == "matrix" else adamw.moments(settings, group)


def _work(settings: OptimizerTable, rows: int, columns: int) -> PartWork:
    """Return what a matrix takes whoever was dealt it: Newton-Schulz iterations (optim/newton_schulz.py)."""
    small, large = sorted((rows, columns))
    gram, square = Product(small, small, large), Product(small, small, small)
    products = (gram, square, Product(small, large, small)) * settings.ns_steps
    # put together, normed, scaled and sent, a tall one turned; in each step addmm copies an addend
    passes = (9 + 2 * (rows > columns)) * small * large
    passes += settings.ns_steps * 2 * (small * large + small * small)
    return PartWork(products, pass_bytes=4 * passes, kernels=8 + 3 * settings.ns_steps)


def _passes(settings: OptimizerTable, group: str) -> float:
    """Return the passes over what a rank has of a matrix: momentum, update, copy to send, decay, step."""
    if group != "matrix":
        return 3 + 2 * len(adamw.moments(settings, group))
    return 10 + 3 * settings.nesterov


MUON = OptimizerKind(
    "muon",
    dict(**adamw.KEYS, momentum=0.95, nesterov=True, ns_steps=5),
    _moments,
    build=Muon,
    whole_matrices=True,
    work=_work,
    own_passes=_passes,
)

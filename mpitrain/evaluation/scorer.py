"""Rows of tokens through the ranks of a layout, and their likelihoods.

Rank 0 asks; all ranks compute. A row is a request with padding after it, which causal attention
doesn't see.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mpitrain.actor.actor import Actor
from mpitrain.actor.communicators import build_mesh
from mpitrain.checkpoint import load
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.status_board import BUSY, WAITING, RankStatus
from mpitrain.comm.base.world import World
from mpitrain.data.documents import IGNORED
from mpitrain.errors import CheckpointError
from mpitrain.evaluation.windows import Score, ScoreRequest
from mpitrain.parallel.microbatch import Microbatch
from mpitrain.plan.plan import Plan
from mpitrain.training.machine.device_placement import place as choose_place
from mpitrain.training.machine.device_placement import way_of_messages
from mpitrain.weights.beginning import checkpoint_source
from mpitrain.weights.first_weights import fill

Questions = Generator[Sequence[ScoreRequest], list[Score], dict[str, Any]]  # asks, and returns a result


class Scorer:
    """A model on this job's layout. Collective over all ranks, but for what rank 0 asks."""

    def __init__(self, plan: Plan, world: World, actor: Actor):
        self._plan = plan
        self._world = world
        self._actor = actor

    def answer(self, questions: Questions | None) -> dict[str, Any]:
        """Answer all that rank 0 asks; return its result on rank 0, nothing on others."""
        result: dict[str, Any] = {}
        scores: list[Score] = []
        waiting: list[ScoreRequest] = []
        asked = 0

        def next_rows() -> list[ScoreRequest] | None:
            nonlocal result, scores, asked
            while not waiting:
                try:
                    received = scores
                    scores = []
                    requests = questions.send(received if asked else None)
                except StopIteration as end:
                    result = end.value
                    return None
                asked += 1
                waiting.extend(requests)
            rows = waiting[: self._plan.config.batch.global_]
            del waiting[: len(rows)]
            return rows

        while (rows := self._world.on_first_rank("reading what is scored", next_rows)) is not None:
            scores += self._score(rows)
        return result

    def _score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return the scores of the rows of a step, on all ranks."""
        config = self._plan.config
        local = config.batch.global_ // config.parallel.dp
        first = self._actor.mesh["dp"].rank * local
        tokens = np.zeros((local, config.data.sequence + 1), np.int64)
        scored = np.zeros((local, config.data.sequence), bool)
        for row, request in enumerate(requests[first : first + local]):
            length = len(request.tokens)
            tokens[row, :length] = request.tokens
            scored[row, length - 1 - request.num_scored : length - 1] = True
        device = self._actor.site.device
        rows, counted = torch.from_numpy(tokens).to(device), torch.from_numpy(scored).to(device)
        microbatches = self._actor.cutter.cut(rows, None, counted)
        made = self._actor.score(microbatches)
        mine = []
        if self._actor.mesh["tp"].rank == 0:  # the ranks of tp have the same
            for number, scores in made.items():
                mine += _sums_of_rows(first + number * config.batch.micro, microbatches[number], scores)
        return _together(self._world.all_gather("scores", mine), len(requests))


def _sums_of_rows(
    first: int, microbatch: Microbatch, scores_2BT: torch.Tensor
) -> list[tuple[int, float, int, int]]:
    """Return (row, summed loss, tokens that weren't likeliest, sum of likeliest tokens) of the positions
    here that are scored.
    """
    if scores_2BT.dim() != 3:
        raise CheckpointError(
            "the model's own head doesn't give scores of positions (Microbatch.scoring); evaluate it after "
            "an export"
        )
    targets_BT = microbatch.targets
    counted_BT = targets_BT != IGNORED
    loss_B = scores_2BT[0].double().mul(counted_BT).sum(-1)
    token_BT = scores_2BT[1].long()
    missed_B = ((token_BT != targets_BT) & counted_BT).sum(-1)
    sum_B = token_BT.mul(counted_BT).sum(-1)
    columns = loss_B.tolist(), missed_B.tolist(), sum_B.tolist()
    return [(first + row, *numbers) for row, numbers in enumerate(zip(*columns))]


def _together(parts: Sequence[Sequence[tuple[int, float, int, int]]], num_rows: int) -> list[Score]:
    """Return the scores of rows, of which ranks of cp have positions each."""
    losses, missed, tokens = [0.0] * num_rows, [0] * num_rows, [0] * num_rows
    for row, loss, misses, token in (entry for part in parts for entry in part):
        if row < num_rows:
            losses[row] += loss
            missed[row] += misses
            tokens[row] += token
    return [Score(-loss, not misses, token) for loss, misses, token in zip(losses, missed, tokens)]


@contextmanager
def scorer_of(plan: Plan, world: World, place: RankStatus, rundir: RunDir, step: int) -> Iterator[Scorer]:
    """Build the communicators and the model, with the weights of a step. Collective over all ranks.

    Raises InputError, alike on all ranks.
    """
    placement = choose_place(plan, world)
    limit_s = Limit(plan.config.comm.timeout_s).seconds
    way = way_of_messages(placement, world, plan.config.comm.device, limit_s)
    with place.at("build", "making the communicators", WAITING):
        mesh = build_mesh(plan, world.comm, place, way, placement.use)
    place.name(f"{mesh}", limit_s)
    with place.at("build", "building the model", BUSY):
        actor = Actor(plan, mesh, placement.device, place=place, compiled=placement.compiled)

    def read() -> None:
        source = checkpoint_source(load.open_step(rundir.checkpoints, step), plan)
        try:
            fill(actor.gradients.pieces, source, plan.config.run.seed)
        finally:
            source.close()

    with place.at("resume", f"reading step {step}", BUSY):
        world.on_every_rank(f"reading step {step}", read)
    with place.at("resume", "spreading the weights"):
        actor.restored(0)
    actor.settle()
    yield Scorer(plan, world, actor)
    with place.at("end", "freeing the communicators", WAITING):
        mesh.free()

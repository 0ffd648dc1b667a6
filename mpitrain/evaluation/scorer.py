"""Rows of tokens through the ranks of a layout, and their likelihoods. Rank 0 asks; all compute.

A row is a request with padding after it, which causal attention doesn't see.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from mpitrain.actor.actor import Actor
from mpitrain.comm.base.world import World
from mpitrain.data.documents import IGNORED
from mpitrain.errors import CheckpointError
from mpitrain.evaluation.windows import Questions, Score, ScoreRequest
from mpitrain.parallel.microbatch import Microbatch
from mpitrain.plan.division.batch_division import sequences_of
from mpitrain.plan.plan import Plan

# row, summed loss, tokens that weren't likeliest, sum of likeliest tokens
RowSums = tuple[int, float, int, int]


class Scorer:
    """A model on this job's layout. Collective over all ranks, but for what rank 0 asks."""

    def __init__(self, plan: Plan, world: World, actor: Actor, stopping: Callable[[], bool] | None = None):
        self._plan = plan
        self._world = world
        self._actor = actor
        self._stopping = stopping or (lambda: False)  # whether this rank has to stop at once
        self.stopped = False  # one of them had to

    def answer(self, questions: Questions | None) -> dict[str, Any]:
        """Answer all that rank 0 asks; return its result on rank 0, nothing on others, or if stopped."""
        result: dict[str, Any] = {}
        scores: list[Score] = []
        waiting: list[ScoreRequest] = []
        asked = 0

        def next_rows() -> list[ScoreRequest] | None:
            nonlocal result, scores, asked
            while not waiting:
                received, scores = scores, []
                try:
                    waiting.extend(questions.send(received if asked else None))
                except StopIteration as end:
                    result = end.value
                    return None
                asked += 1
            rows = waiting[: self._plan.config.batch.global_]
            del waiting[: len(rows)]
            return rows

        while (rows := self._world.on_first_rank("reading what is scored", next_rows)) is not None:
            scores += self._score(rows)
            if self.stopped:
                return {}
        return result

    def _score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        config = self._plan.config
        mine = sequences_of(config, self._actor.mesh["dp"].rank)
        tokens = np.zeros((len(mine), config.data.sequence + 1), np.int64)
        scored = np.zeros((len(mine), config.data.sequence), bool)
        for row, request in enumerate(requests[mine.start : mine.stop]):
            length = len(request.tokens)
            tokens[row, :length] = request.tokens
            scored[row, length - 1 - request.num_scored : length - 1] = True
        device = self._actor.site.device
        rows, counted = torch.from_numpy(tokens).to(device), torch.from_numpy(scored).to(device)
        microbatches = self._actor.cutter.cut(rows, None, counted)
        made = self._actor.score(microbatches)
        segments = self._plan.table.segments  # of a row: each has sums of its own
        sums: list[RowSums] = []
        if self._actor.mesh["tp"].rank == 0:  # the ranks of tp have the same
            for number, scores in made.items():
                row = mine.start + number // segments * config.batch.micro
                sums += _sums_of_rows(row, microbatches[number], scores)
        whole = all(scores.dim() == 3 for scores in made.values())
        of_ranks = self._world.all_gather("scores", (sums, whole, self._stopping()))
        if not all(whole for _, whole, _ in of_ranks):
            what = "the model's own head doesn't give scores of positions (Microbatch.scoring)"
            raise CheckpointError(f"{what}; evaluate it after an export")
        self.stopped = any(stopping for *_, stopping in of_ranks)
        return _together([sums for sums, *_ in of_ranks], len(requests))


def _sums_of_rows(first: int, microbatch: Microbatch, scores_2BT: torch.Tensor) -> list[RowSums]:
    """Return the sums of rows over the positions here that are scored; none without scores of positions."""
    if scores_2BT.dim() != 3:
        return []
    targets_BT = microbatch.targets
    counted_BT = targets_BT != IGNORED
    loss_B = scores_2BT[0].double().mul(counted_BT).sum(-1)
    token_BT = scores_2BT[1].long()
    missed_B = ((token_BT != targets_BT) & counted_BT).sum(-1)
    sum_B = token_BT.mul(counted_BT).sum(-1)
    columns = loss_B.tolist(), missed_B.tolist(), sum_B.tolist()
    return [(first + row, *numbers) for row, numbers in enumerate(zip(*columns))]


def _together(parts: Sequence[Sequence[RowSums]], num_rows: int) -> list[Score]:
    """Return the scores of rows, of which ranks of cp, and segments, have positions each."""
    losses, missed, tokens = [0.0] * num_rows, [0] * num_rows, [0] * num_rows
    for row, loss, misses, token in (entry for part in parts for entry in part):
        if row < num_rows:
            losses[row] += loss
            missed[row] += misses
            tokens[row] += token
    return [Score(-loss, not misses, token) for loss, misses, token in zip(losses, missed, tokens)]

"""What chains of runs compute whose settings change in between: plain torch in fp64, plain integers.

Nothing here comes from mpitrain. What a change means is in docs/guides: resuming.md, data.md,
optimisers-and-rates.md. The order of an epoch is the network that mpitrain/data/permutation.py describes.
"""

import math

import numpy as np
import torch
from journeys import Learner, windows
from tiny_transformers import double

ROUNDS = 8


def window_at(place, count, seed):
    """Return the window at a place of the order of `count` windows, over epochs."""
    epoch, cell = divmod(place, count)
    side = math.isqrt(count - 1) + 1
    side += side % 2
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(ROUNDS).tolist()
    while True:
        row, column = divmod(cell, side)
        for key in keys:
            row, column = column, (row + hashed(column ^ key, side)) % side
        cell = row * side + column
        if cell < count:
            return cell


def hashed(number, limit):
    number = number * 0xBF58476D1CE4E5B9 % 2**64
    number ^= number >> 32
    number = number * 0x94D049BB133111EB % 2**64
    return (number >> 32) * limit >> 32


def rate(step, settings):
    """Return the learning rate of a step, counted from 1."""
    peak, warmup, final = (settings[key] for key in ("optimizer.lr", "schedule.warmup", "schedule.final"))
    steps = settings["schedule.steps"] or settings["run.steps"]
    if step <= warmup:
        return peak * step / warmup
    if settings["schedule.name"] == "constant":
        return peak
    if settings["schedule.name"] == "wsd":
        length = settings["schedule.decay"] or max(1, min(steps // 10, steps - warmup))
        return peak * (final + (1 - final) * min(max(steps - step, 0), length) / length)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (final + (1 - final) * (1 + math.cos(math.pi * done)) / 2)


class ChangedLearner(Learner):
    """A Learner whose settings may change between its steps.

    end: the token between documents.  read: tokens of the data's order before the next step.
    """

    def __init__(self, folder, end):
        super().__init__(folder, rate=1.0)
        self.end = end
        for module in self.model.modules():  # no token is left out, the one that pads neither
            if isinstance(module, torch.nn.Embedding):
                module.padding_idx = None

    def begin(self):
        """Begin a run: weights stay, all else is new."""
        self.restart()
        self.number = self.tokens = self.read = 0

    def train(self, ids, settings):
        """Return loss, norm before clipping, learning rate and tokens of the next step."""
        batch, sequence = settings["batch.global"], settings["data.sequence"]
        first = -(-self.read // sequence)
        self.read = (first + batch) * sequence
        self.number += 1
        self.tokens += batch * sequence
        rows = windows(ids, sequence)
        order = [window_at(first + i, len(rows), settings["run.seed"]) for i in range(batch)]
        lr = rate(self.number, settings)
        for group, decay in zip(self.optimizer.param_groups, (settings["optimizer.decay"], 0)):
            group.update(lr=lr, weight_decay=decay, betas=settings["optimizer.betas"])
        with double():
            self.optimizer.zero_grad()
            loss = self.mean_loss(rows[order], settings)
            loss.backward()
            clip = settings["optimizer.clip"] or math.inf
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
        return float(loss.detach()), float(norm), lr, self.tokens

    def validate(self, ids, settings):
        rows = windows(ids, settings["data.sequence"])
        count = min(settings["batch.global"] * settings["run.eval_batches"], len(rows))
        with double(), torch.no_grad():
            return float(self.mean_loss(rows[:count], settings))

    def mean_loss(self, rows, settings):
        if settings["data.documents"] == "joined":
            return self.loss(rows)
        parts = [part for row in rows for part in self.documents(row) if len(part) > 1]
        counts = [len(part) - 1 for part in parts]
        return sum(self.loss(part[None]) * n for part, n in zip(parts, counts)) / sum(counts)

    def documents(self, row):
        """Cut a row after each end of a document. Positions are relative, so each part may begin at 0."""
        ends = (row == self.end).nonzero().flatten() + 1
        return row.tensor_split(ends)

"""The rows of tokens that this data-parallel rank reads for a step, and their microbatches.

A thread reads the rows of the next step while a step is computed.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import numpy as np
import torch

from mpitrain.actor.actor import Actor
from mpitrain.cluster.threads import submitted
from mpitrain.data.mixture import Samplers, batch_slots
from mpitrain.data.token_rows import TokenRows
from mpitrain.parallel.microbatch import Microbatch
from mpitrain.plan.division.batch_division import sequences_of


class StepRows:
    """This rank's sequences of each step. separate: documents are. num_sequences: of all ranks."""

    def __init__(self, actor: Actor, separate: bool, dp_rank: int):
        self._actor = actor
        self._separate = separate
        self._dp_rank = dp_rank
        plan = actor.plan
        self._rows_each = plan.run_config.data.sequence // plan.config.data.sequence
        self.num_sequences = plan.config.batch.global_ // self._rows_each
        self._pool = ThreadPoolExecutor(1, "mpitrain-rows")
        self._lock = Lock()  # samplers keep what they planned last
        self._ahead: tuple[Samplers, int, Future[TokenRows]] | None = None

    def read_ahead(self, sampler: Samplers, first: int) -> None:
        """Begin to read the rows of a later step."""
        if self._actor.cutter.needs_tokens(self._separate):
            self._ahead = sampler, first, submitted(self._pool, self.rows, sampler, first)

    def microbatches(self, sampler: Samplers, first: int, most: int | None = None) -> list[Microbatch]:
        """Return this rank's microbatches of the step that begins at place `first` of the order.

        Stages in the middle look only for documents. most: sequences that count, of those of all
        steps; what fills the last step after them carries no loss.
        """
        device = self._actor.site.device
        needed = self._actor.cutter.needs_tokens(self._separate)
        rows = self._read(sampler, first) if needed else TokenRows(np.empty(0, np.int64))
        tokens = torch.from_numpy(rows.tokens).to(device)
        ends = None if rows.ends is None else torch.from_numpy(rows.ends).to(device)
        scored = None if rows.scored is None else torch.from_numpy(rows.scored[:, 1:]).to(device)
        if most is not None:
            with self._lock:
                places = self._slots(sampler, first)
            slots = [slot for slot in places for _ in range(self._rows_each)]
            counted = torch.tensor([[slot < most] for slot in slots], device=device)
            scored = counted if scored is None else scored & counted
        return self._actor.cutter.cut(tokens, ends, scored)

    def _read(self, sampler: Samplers, first: int) -> TokenRows:
        """Return the rows, which may be read already or on their way."""
        if self._ahead is not None and self._ahead[0] is sampler:
            _, begun, rows = self._ahead
            self._ahead = None
            if begun == first:
                return rows.result()
        return self.rows(sampler, first)

    def rows(self, sampler: Samplers, first: int) -> TokenRows:
        """Return the rows themselves."""
        with self._lock:
            return sampler.rows(self._slots(sampler, first)).divided(self._rows_each)

    def _slots(self, sampler: Samplers, first: int) -> list[int]:
        """Return the places of this rank's sequences in the order of the text."""
        mine = sequences_of(self._actor.plan.run_config, self._dp_rank, self.num_sequences)
        return batch_slots(sampler, first, self.num_sequences)[mine.start : mine.stop]

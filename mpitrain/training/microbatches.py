"""The microbatches of one rank, of the tokens of its data-parallel rank."""

import torch

from mpitrain.actor.actor import Actor
from mpitrain.data.documents import Ends
from mpitrain.parallel.microbatch import Microbatch


def needs_tokens(actor: Actor, separate: bool) -> bool:
    """Tell whether a rank has to see tokens: stages in the middle look only for documents."""
    return actor.first or actor.last or separate


def microbatches_of(
    actor: Actor, tokens: torch.Tensor, ends: Ends | None, counted: torch.Tensor | None = None
) -> list[Microbatch]:
    """Return the microbatches of a step.

    tokens: of its sequences on this data-parallel rank, [batch, sequence + 1].

    ends: where documents end in these, if they are separate.
    counted: as Actor.cut() has it.
    """
    if not needs_tokens(actor, ends is not None):
        return [Microbatch() for _ in range(actor.plan.num_microbatches * actor.table.segments)]
    return actor.cut(tokens, ends, counted)

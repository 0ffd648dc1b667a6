"""Which document each position of a row belongs to, and which of its targets carry loss.

    tokens     a  b  .  c  d  e  .  .  f  `.` is the end-of-text token: it belongs to the document
                                          it ends
    documents  0  0  0  1  1  1  1  2     of the inputs, all tokens but the last
    targets    b  .  -  d  e  .  -  -     the next tokens; -: no loss, as nothing tells how another
                                          document begins

A row may begin and end in the middle of a document.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

IGNORED = -1  # a target that carries no loss
# where a document ends, true at its last token, as many as tokens; or the token that ends each
Ends = torch.Tensor | int


def documents_of(inputs_BT: torch.Tensor, ends: Ends) -> torch.Tensor:
    """Return the number of each position's document, counted from 0 in its row. Any leading dims."""
    ends_BT = _ends(inputs_BT, ends)
    return ends_BT.cumsum(-1) - ends_BT.long()


def separate(tokens: torch.Tensor, ends: Ends) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (documents, targets) of rows of tokens [..., T + 1], [..., T] each.

    IGNORED where a target carries no loss.
    """
    ends_BT = _ends(tokens, ends)[..., :-1]
    targets = tokens[..., 1:]
    return documents_of(tokens[..., :-1], ends_BT), targets.masked_fill(ends_BT, IGNORED)


def positions_within(documents_BT: torch.Tensor) -> torch.Tensor:
    """Return each position's distance from the first one of its document, [B, T]."""
    positions_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    positions_BT = positions_T.expand_as(documents_BT)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT.diff(dim=1) != 0
    return positions_BT - positions_BT.masked_fill(~begins_BT, 0).cummax(1).values


def _ends(tokens: torch.Tensor, ends: Ends) -> torch.Tensor:
    return tokens == ends if isinstance(ends, int) else ends


def further_tokens(next_BT: torch.Tensor, depths: int) -> tuple[torch.Tensor, ...]:
    """Return the next tokens of whole rows, and those after them of each further depth.

    IGNORED: after the end of the row, or of the document.
    """
    found = [next_BT]
    for depth in range(depths):
        ahead = torch.full_like(next_BT, IGNORED)
        ahead[:, : -1 - depth] = next_BT[:, 1 + depth :]
        found.append(ahead.masked_fill(found[-1] == IGNORED, IGNORED))
    return tuple(found)


def with_loss(tokens: Sequence[torch.Tensor], scored: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what further_tokens() does as targets: IGNORED, too, where a token carries no loss.

    scored: of the next tokens, [B, T], or [B, 1] of whole rows.
    """
    unscored_BT = ~scored.expand_as(tokens[0])
    found = []
    for depth, token_BT in enumerate(tokens):
        of_depth = functional.pad(unscored_BT[:, depth:], (0, depth))
        found.append(token_BT.masked_fill(of_depth, IGNORED))
    return tuple(found)


def num_counted(targets: torch.Tensor) -> torch.Tensor:
    """Return how many targets carry loss, where they are."""
    return (targets != IGNORED).sum()

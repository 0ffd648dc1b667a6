"""A key-value cache for training: a sequence in segments that go through the pipeline in turn
(Seq1F1B, arXiv:2406.03488; TeraPipe, arXiv:2102.07988).

Queries of a segment attend to the keys and values of the segments before it, which are kept.
Backwards run from the last segment to the first: each leaves gradients of the earlier keys and
values, and these are the ones that a segment's backward starts from, besides the gradient of its
output. A mixture of experts keeps what its balance loss needs of each segment.
"""

from dataclasses import dataclass, field

import torch


@dataclass
class KeysValues:
    """Keys and values of a segment, [B, K, T, C] each, and the gradients that later ones left."""

    tensors: tuple[torch.Tensor, ...]
    grads: list[torch.Tensor] = field(default_factory=list)

    def add(self, grads: list[torch.Tensor]) -> None:
        """Add gradients of both."""
        self.grads = [a + b for a, b in zip(self.grads, grads)] if self.grads else grads


# the segments of one microbatch so far: KeysValues by attention, sums by mixture of experts
History = dict[object, list]


@dataclass
class Attended:
    """What a segment's backward must know: its keys and values, and those it saw as leaves."""

    own: KeysValues
    own_outputs: tuple[torch.Tensor, torch.Tensor]
    before: list[tuple[KeysValues, list[torch.Tensor]]]

    def outputs_and_grads(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the outputs that later segments used and what they left: nothing for the last.

        Both are forgotten, with the keys and values, which nobody needs any more.
        """
        grads, self.own.grads = self.own.grads, []
        self.own.tensors = ()
        return (list(self.own_outputs), grads) if grads else ([], [])

    def leaves(self) -> list[torch.Tensor]:
        """Return the keys and values of earlier segments."""
        return [leaf for _, pair in self.before for leaf in pair]

    def leave(self, grads: tuple[torch.Tensor, ...]) -> None:
        """Leave the gradients of `leaves` to the earlier segments."""
        for i, (earlier, _) in enumerate(self.before):
            earlier.add(list(grads[2 * i : 2 * i + 2]))


def attend(
    segments: list[KeysValues], number: int, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Attended]:
    """Append the keys and values of segment `number`; return those of all so far, and Attended.

    If they are here already, this is the forward computed again for the backward: then later
    segments have left gradients.
    """
    before = []
    for earlier in segments[:number]:
        leaves = [tensor.detach().requires_grad_(torch.is_grad_enabled()) for tensor in earlier.tensors]
        before.append((earlier, leaves))
    if number == len(segments):
        segments.append(KeysValues((key.detach(), value.detach())))
    own = segments[number]
    keys, values = (
        torch.cat([*(pair[i] for _, pair in before), tensor], -2) for i, tensor in enumerate((key, value))
    )
    return keys, values, Attended(own, (key, value), before)


def mask(
    begin: int, end: int, documents_BT: torch.Tensor | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return what is added to the scores of positions [begin, end) with all keys up to there: -inf
    where a key may not be seen, [queries, keys]; [B, 1, queries, keys] with documents, each apart.
    """
    seen = torch.ones(end - begin, end, dtype=torch.bool, device=device).tril(begin)
    if documents_BT is not None:
        seen = (seen & (documents_BT[:, begin:end, None] == documents_BT[:, None, :end]))[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)

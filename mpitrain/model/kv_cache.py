"""A key-value cache for generation: a token is computed once, and later ones attend to its keys and values.

It keeps of each attention layer keys and values of grouped heads, not repeated; of latent attention
(arXiv:2405.04434, section 2.1) the latent vectors. Of a sliding window of w it keeps the last w
positions in a ring: position p is in slot p % w. The order of keys doesn't matter to attention, as
they are turned already.

    window 4    slot      0  1  2  3
    6 tokens    position  4  5  2  3

Memory is taken once, for the longest text. Training has kv_history.py.
B texts, K key-value heads, S slots, C features.
"""

import torch


class SlotTensors:
    """What one layer keeps: [B, K, S, C] each, of the last S positions."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._end = 0  # positions so far
        self._kept: tuple[torch.Tensor, ...] = ()

    def put(self, start: int, *tensors: torch.Tensor) -> None:
        """Keep those [B, K, T, C] of the positions from `start` on."""
        if not self._kept:
            self._kept = tuple(x.new_empty(*x.shape[:2], self.num_slots, x.shape[-1]) for x in tensors)
        length = tensors[0].shape[2]
        self._end = start + length
        first = max(start, self._end - self.num_slots)
        if length == 1:
            for kept, x in zip(self._kept, tensors):
                kept[:, :, start % self.num_slots] = x[:, :, 0]
            return
        slots = torch.arange(first, self._end, device=tensors[0].device) % self.num_slots
        for kept, x in zip(self._kept, tensors):  # of a prompt longer than a window, its end
            kept[:, :, slots] = x[:, :, first - start :]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the slots that are filled, of each."""
        return tuple(x[:, :, : min(self._end, self.num_slots)] for x in self._kept)

    def seen(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the columns of these slots of a mask [..., positions so far]."""
        if mask is None or self._end <= self.num_slots:
            return mask
        slots = torch.arange(self.num_slots, device=mask.device)
        last = self._end - 1
        return mask[..., last - (last - slots) % self.num_slots]


class KeyValueCache:
    """What the attention layers keep of a text of at most `capacity` tokens. length: those in it."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self._of: dict[object, SlotTensors] = {}

    def kept(self) -> list[torch.Tensor]:
        """Return all that is kept."""
        return [x for slots in self._of.values() for x in slots.tensors()]

    def of(self, layer: object, window: int = 0) -> SlotTensors:
        """Return what a layer keeps. window: positions, at most; 0: all."""
        if layer not in self._of:
            self._of[layer] = SlotTensors(min(window or self.capacity, self.capacity))
        return self._of[layer]

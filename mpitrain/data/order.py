"""Which tokens a step trains on: a pure function of (seed, slot).

There is no state, so resuming needs only the step. The order of an epoch is in permutation.py.

slot  = step * global batch + index in the batch        epoch = slot // num_sequences

tokens  0 1 2 3 4 5 6 7 8 9        sequence = 3: window i is tokens[3i : 3i + 4], and its last token
        |- - -|  is the first of window i + 1: it is a target here and an input there
              |- - -|
                    |- - -|
"""

import numpy as np

from mpitrain.data.permutation import FEISTEL, ORDERS, TextOrder
from mpitrain.data.token_rows import Text, TokenRows
from mpitrain.errors import DataError


class Sampler:
    """The sequences of a text, in an order of their own for every epoch.

    seed: of the orders; None: the sequences come as they lie in the text.
    order: name of the permutation, of ORDERS.
    attended_length: positions that attention has to cross: those of a sequence.
    """

    def __init__(self, text: Text | np.ndarray, sequence: int, seed: int | None = None, order: str = FEISTEL):
        if len(text) < sequence + 1:
            raise DataError(
                f"data.sequence = {sequence} needs {sequence + 1} tokens, there are {len(text)}; "
                "use a smaller data.sequence or more text"
            )
        self.num_sequences = (len(text) - 1) // sequence
        self.is_shuffled = seed is not None
        self.attended_length = sequence
        self._text = text if isinstance(text, Text) else Text(text)
        self._sequence = sequence
        self._order = TextOrder() if seed is None else ORDERS[order](self.num_sequences, seed)

    def rows(self, slots) -> TokenRows:
        """Return the windows for `slots`, in the order asked: [len(slots), sequence + 1]."""
        return self._text.rows(
            self._windows(np.asarray(slots, np.int64)) * self._sequence, self._sequence + 1
        )

    def pieces(self, slot: int) -> list[tuple[int, int]]:
        """Return the pieces of tokens.bin that a slot's window has: begin and end of each."""
        start = int(self._windows(np.array([slot]))[0]) * self._sequence
        return [piece[:2] for piece in self._text.pieces(start, self._sequence + 1)]

    def costs(self, slots) -> None:
        """Attention over whole windows costs the same."""

    def _windows(self, slots: np.ndarray) -> np.ndarray:
        """Return the index of each slot's window."""
        epochs, places = np.divmod(slots, self.num_sequences)
        windows = np.empty_like(places)
        # ascending: a batch over the end of an epoch leaves the new epoch in the order's cache
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = self._order.windows(int(epoch), places[here])
        return windows

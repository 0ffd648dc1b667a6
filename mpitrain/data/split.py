"""Training and validation tokens: the tail of the corpus is held out."""

import numpy as np

from mpitrain.errors import DataError


def split(tokens: np.ndarray, val_fraction: float, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (training, validation) views of `tokens` that share no token.

    Validation is the last `val_fraction` of the tokens, but at least one sequence; training keeps at least one as well.
    """
    if not 0 < val_fraction < 1:
        raise DataError(f"data.val_fraction = {val_fraction}; it must lie between 0 and 1, such as 0.05")
    if sequence < 1:
        raise DataError(f"data.sequence = {sequence}; it must be at least 1")
    window = sequence + 1  # inputs and, one further, targets
    if len(tokens) < 2 * window:
        raise DataError(
            f"data.sequence = {sequence} needs {2 * window} tokens (one sequence to train on and one to validate with), "
            f"the corpus has {len(tokens)}; use a smaller data.sequence or more text"
        )
    held_out = min(max(int(len(tokens) * val_fraction), window), len(tokens) - window)
    return tokens[:-held_out], tokens[-held_out:]

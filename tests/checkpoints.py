"""What the tests of checkpoints share."""


def meta_of(step: int) -> dict:
    """Return a meta as the trainer writes it."""
    return {"step": step, "tokens": 256 * step, "updates": step, "skipped": 0, "data": "0" * 32, "loss_scale": [1.0, 0]}

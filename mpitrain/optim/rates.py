"""The learning rate of every step, as a pure function of the step."""

import math

from mpitrain.config import Config


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of `step`, counted from 1: linear warm-up, then the named schedule.

    cosine: half a cosine down to schedule.final at the last step (arXiv:1608.03983).
    wsd: warm-up, stable, and a linear decay over the last schedule.decay steps (arXiv:2404.06395).
    constant: no decay. Steps after schedule.steps have the rate of the last one.
    """
    schedule = config.schedule
    peak = config.optimizer.lr
    steps = schedule.steps or config.run.steps
    if step <= schedule.warmup:
        return peak * step / schedule.warmup
    if schedule.name == "constant":
        return peak
    if schedule.name == "wsd":
        decay = schedule.decay or max(1, min(steps // 10, steps - schedule.warmup))
        left = min(1.0, max(0, steps - step) / decay)
        return peak * (schedule.final + (1 - schedule.final) * left)
    done = (step - schedule.warmup) / max(1, steps - schedule.warmup)
    return peak * (schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

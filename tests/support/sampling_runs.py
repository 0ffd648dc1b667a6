"""Runs of tiny models with random weights, and the text that `mpitrain generate` makes of them."""

import numpy as np
from checkpoints import meta_of
from launch import MPITRAIN, environment, finished

from mpitrain import config as settings
from mpitrain.checkpoint.save import begin, commit, write_shard
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.settings.resolve import resolve

TINY = (
    "model.layers=2",
    "model.width=16",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=32",
    "data.sequence=32",
    "model.tied=false",
)


def make_run(path, *overrides, change=lambda arrays: None, steps=(10,)):
    """Make the run directory of a tiny model with random weights; `change` may alter these of the
    last step.
    """
    config = resolve(settings.load(None, (*TINY, *overrides)), 1, 256)
    path.mkdir(exist_ok=True)
    (path / "config.toml").write_text(settings.to_toml(config))
    dtype = np.float64 if config.precision.compute == "fp64" else np.float32
    for step in steps:
        random = np.random.default_rng(step)
        every = plan_of(config).parameters()
        arrays = {
            f"parameters/{s.name}": random.standard_normal(s.shape).astype(dtype) * (s.std or 1)
            for s in every
        }
        if step == steps[-1]:
            change(arrays)
        tmp = begin(path / "checkpoints", step)
        write_shard(tmp, 0, arrays)
        commit(tmp, meta_of(step))
    return path


def text(run_dir, temperature=0.8, seed=1, tokens=20, prompt="def ", tokenizer=None):
    from mpitrain.generation.sampling import SamplingRules
    from mpitrain.generation.text_sampler import SamplingRequest, sample

    rules = SamplingRules(temperature)
    return "".join(sample(str(run_dir), prompt, SamplingRequest(tokens, seed, rules, tokenizer)))


def command(*given, env=None):
    return finished(
        [MPITRAIN, "generate", *map(str, given)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=60,
        env=environment(**(env or {})),
    )

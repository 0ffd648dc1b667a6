"""Parameters and FLOPs of every preset at its full size are those of transformers' model of its config.json.

That model is built on torch's meta device, which takes no memory: 405 billion parameters in a second.
"""

import logging

import pytest
import torch
from conftest import LONG
from torch.utils.flop_counter import FlopCounterMode

from mpitrain.config import load
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.family import presets
from mpitrain.plan.predict.step_time.step_model import step_model
from mpitrain.plan.settings.resolve import resolve
from mpitrain.weights.keys import fields_of

LENGTH = 128


def their_model(config):
    """Return transformers' model of a resolved configuration, without numbers."""
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # positions are fewer than were trained with
    kind, fields = fields_of(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.CONFIG_MAPPING[kind.name](**fields),
            attn_implementation="eager",
            dtype=torch.bfloat16,
        )
    model.tie_weights()
    return model


def their_flops(model):
    """Return the FLOPs of a token in a forward, of all scores: a mask leaves none out."""
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), torch.device("meta"):
        tokens = torch.zeros(1, LENGTH, dtype=torch.long)
        mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bfloat16)
        kinds = set(getattr(model.config, "layer_types", None) or ())
        masks = dict.fromkeys(kinds, mask) if len(kinds) > 1 else mask
        model(tokens, attention_mask=masks, position_ids=torch.arange(LENGTH)[None], use_cache=False)
    return counter.get_total_flops() / LENGTH


NAMES = sorted(presets(), key=lambda name: (name != "gpt2", name))


@pytest.mark.parametrize("preset", [NAMES[0], *(pytest.param(name, marks=LONG) for name in NAMES[1:])])
def test_a_preset_has_the_counts_of_transformers(preset):
    """Of experts no FLOPs are counted on that device; their loads are no parameters of transformers."""
    config = load(None, (f"model.preset={preset}", f"data.sequence={LENGTH}"))
    plan = plan_of(resolve(config, 1, 256, needed=1))
    theirs = their_model(plan.config)
    ours = sum(count * spec.numel for spec, count in plan.model.parameters() if spec.trained)
    assert sum(parameter.numel() for parameter in theirs.parameters()) == ours
    if not plan.config.experts.count:
        assert 3 * their_flops(theirs) == step_model(plan).flops_per_token(LENGTH, halved=False)

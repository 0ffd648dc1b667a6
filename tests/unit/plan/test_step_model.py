"""A planner plans what is trained: parameters and FLOPs of a prediction are those of the model's layers.

The wanted numbers are counted here, weight by weight and pair by pair of positions.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from conftest import LONG

from mpitrain.config import load
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.family import FAMILIES, presets
from mpitrain.plan.declared.layer import Layer, work_of
from mpitrain.plan.declared.parameters import matrix
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.model_parts import model_parts
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.step import predict_step
from mpitrain.plan.predict.step_time.step_model import StepModel, step_model, works_of
from mpitrain.plan.settings.resolve import resolve
from mpitrain.planner.of_config import model_of

SEQUENCES = (1024, 8192, 131072)


def planned(*overrides):
    return plan_of(resolve(load(None, overrides), 1, 256))


def counted_flops(plan):
    """Return 6 for each weight that a token is multiplied with, and 12 for each pair and feature."""
    sequence = plan.config.data.sequence
    matrices = {spec.name: spec for spec in plan.parameters() if spec.group == "matrix"}
    flops = 6.0 * sum(spec.numel * spec.active for spec in matrices.values())
    model, own = plan.config.model, plan.config.attention
    heads_of_logits = 1 + model.mtp
    flops += 6.0 * heads_of_logits * model.vocab * model.width
    width = own.head_width or model.width // model.heads
    features = 2 * width if not own.kv_rank else width + own.rotary_width + own.value_width
    for block in [*range(model.layers), *[model.layers - 1] * model.mtp]:
        letters = own.window_blocks or "w"
        window = own.window if own.window and letters[block % len(letters)] != "f" else sequence
        window = min(window, sequence)
        pairs = window * sequence - window * window / 2  # the mask's diagonal counts a half
        flops += 6.0 * model.heads * features * pairs / sequence
    return flops


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize("preset", sorted(presets()))
def test_a_preset_is_planned_as_it_is_trained(preset, sequence):
    learned = () if "gpt" not in preset or "oss" in preset else (f"model.positions={sequence}",)
    settings = (f"model.preset={preset}", f"data.sequence={sequence}", *learned)
    plan = planned(*settings)
    model = model_of(load(None, settings))
    trained = sum(spec.numel for spec in plan.parameters())
    parts = model_parts(plan).values()
    assert model.num_parameters == trained == sum(part.parameters for part in parts)
    assert model.flops_per_token(sequence) == plan.flops_per_token()
    assert model.flops_per_token(sequence) == pytest.approx(counted_flops(plan), rel=1e-12)
    assert sum(part.flops for part in parts) == pytest.approx(plan.flops_per_token(), rel=1e-12)


def random_settings(seed):
    """Return a model of some family, with what any of them can have."""
    draw = random.Random(seed)
    family = draw.choice(sorted({preset["family"] for preset in presets().values()}))
    heads, width = draw.choice([2, 4, 8]), draw.choice([64, 128, 192])
    sequence = draw.choice([256, 1024, 4096])
    keys = dict(
        family=family, layers=draw.randint(1, 9), width=width, heads=heads, ffn=draw.choice([96, 200])
    )
    keys |= dict(vocab=draw.choice([256, 1001]), tied=draw.choice(["true", "false"]))
    if family == "gpt2":
        keys |= dict(positions=sequence)
    else:
        keys |= dict(mtp=draw.choice([0, 0, 1, 2]))
    if FAMILIES.built_in()[family].grouped:
        keys |= dict(kv_heads=heads // draw.choice([1, 2]))
    found = [f"model.{key}={value}" for key, value in keys.items()]
    if family in ("mistral", "gemma2", "gemma3", "gpt-oss", "olmo3") and draw.random() < 0.7:
        found.append(f"attention.window={draw.choice([16, 100, 2048])}")
    if family in ("mixtral", "qwen3-moe"):
        found += ["experts.count=4", "experts.active=2", f"experts.every={draw.choice([1, 2, 3])}"]
    return [*found, f"data.sequence={sequence}"]


@pytest.mark.parametrize("seed", range(300 if LONG else 40))
def test_random_models_are_planned_as_they_are_trained(seed):
    settings = random_settings(seed)
    plan = planned(*settings)
    model = step_model(plan)
    assert model.num_parameters == sum(spec.numel for spec in plan.parameters())
    assert model.flops_per_token(plan.config.data.sequence) == plan.flops_per_token()
    assert plan.flops_per_token() == pytest.approx(counted_flops(plan), rel=1e-12)


def test_a_family_of_ones_own_is_planned_as_it_is_trained():
    settings = ("model.family=new_family:CAPPED", "model.preset=capped-tiny", "attention.window=3")
    plan = planned(*settings)
    model = step_model(plan)
    assert len(model.kinds) == 2  # with a window, and without
    assert model.num_parameters == sum(spec.numel for spec in plan.parameters())
    assert model.flops_per_token(plan.config.data.sequence) == plan.flops_per_token()


def test_what_all_positions_see_is_twice_what_a_mask_leaves():
    model = step_model(planned("model.preset=llama3-8b", "data.sequence=4096"))
    halved, whole = (model.flops_per_token(4096, halved) for halved in (True, False))
    assert whole - halved == pytest.approx(6 * 32 * 2 * 32 * 128 * 4096 / 2)


@dataclass
class Bare:
    """A layer of a user's own: without a hash, and without `work`."""

    layer: Any
    metrics = ()

    def parameters(self):
        return self.layer.parameters()

    def flops(self, sequence):
        return self.layer.flops(sequence)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_that_declares_no_work_has_that_of_its_weights_and_flops(tp):
    plan = planned("model.layers=4", "data.sequence=256")
    bare = tuple(Bare(layer) for layer in plan.model.blocks[0])
    model = StepModel(plan.config, replace(plan.model, blocks=4 * (bare,)), "bare")
    assert [count for _, count in model.layers.kinds] == [4]
    assert model.num_parameters == sum(spec.numel for spec in plan.parameters())
    layout = StepLayout(tp, 256, 8, micro=2, tp=tp)
    mine, declared = (works_of(each, layout, 1.0).kinds[0] for each in (model, step_model(plan)))
    for ours, theirs in zip(mine, declared, strict=True):
        assert ours.product_flops == theirs.product_flops
        assert ours.core.flops == pytest.approx(theirs.core.flops, rel=1e-6)
        assert (ours.forward, ours.backward) == (theirs.forward, theirs.backward)
    assert predict_step(model, layout, machine_of(find_machine("laptop"))).seconds > 0


def test_a_layer_that_declares_no_work_has_that_of_its_parameters():
    class Square(Layer):
        kept = left = working = traffic = items = None  # not asked

        def parameters(self):
            return (matrix("square.weight", 64, 64, None),)

    work = work_of(Square(), StepLayout(1, 128, 1), 1.0, 64)
    assert [(p.n, p.k) for p in work.products] == [(64, 64)]

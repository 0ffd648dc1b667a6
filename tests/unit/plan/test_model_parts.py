"""Parameters and FLOPs of a model by part: they add up, and are those of published models."""

from types import SimpleNamespace

import pytest

from mpitrain import config as settings
from mpitrain.commands.inspect import show_memory
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.family import FAMILIES
from mpitrain.plan.declared.parameters import Spec
from mpitrain.plan.predict.model_parts import activation_line, model_parts, parts_table
from mpitrain.plan.settings.resolve import resolve


def plan(*words):
    return plan_of(resolve(settings.load(None, words), 1, 256))


@pytest.mark.parametrize("more", [(), ("model.mtp=1",)], ids=["", "mtp"])
@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("family", FAMILIES.built_in())
def test_parts_add_up_to_the_model(family, tied, more):
    if more and family == "gpt2":
        pytest.skip("further tokens aren't predicted with learned positions")
    found = plan(f"model.family={family}", f"model.tied={tied}", "model.layers=4", *more)
    parts = model_parts(found)
    assert sum(part.parameters for part in parts.values()) == sum(each.numel for each in found.parameters())
    assert sum(part.flops for part in parts.values()) == pytest.approx(found.flops_per_token())
    assert "other" not in parts and not ("experts" in parts and "router" not in parts)
    assert parts["attention"].flops > 0 and parts["head"].flops == 6 * 256 * found.config.model.width
    assert ("further tokens" in parts) == bool(more) and parts["embedding"].flops == 0


def test_llama_3_8b_by_hand():
    parts = model_parts(plan("model.preset=llama3-8b", "data.sequence=8192"))
    width, ffn, vocab, layers = 4096, 14336, 128256, 32
    products = {"attention": 2 * width**2 + 2 * width * 1024, "feed-forward": 3 * width * ffn}
    for name, weights in products.items():
        assert parts[name].parameters == layers * (weights + width)
    assert parts["embedding"].parameters == vocab * width
    assert parts["head"].parameters == vocab * width + width
    assert parts["feed-forward"].flops == 6 * layers * products["feed-forward"]
    scores = 6 * layers * width * 8192  # half of 12 D T: causal (arXiv:2204.02311, appendix B)
    assert parts["attention"].flops == pytest.approx(6 * layers * products["attention"] + scores, rel=1e-3)


def test_a_token_of_deepseek_v3_meets_37_billion_of_671():
    """arXiv:2412.19437, section 1."""
    parts = model_parts(plan("model.preset=deepseek-v3"))
    assert sum(part.parameters for part in parts.values()) == pytest.approx(671e9, rel=1e-3)
    met = sum(part.active for name, part in parts.items() if name != "embedding")
    assert met == pytest.approx(36.6e9, rel=5e-3)
    assert parts["experts"].parameters == 58 * 256 * 3 * 7168 * 2048
    assert parts["experts"].flops == pytest.approx(6 * parts["experts"].parameters * 8 / 256)


def test_the_formula_of_gpt_3s_activations():
    """arXiv:2205.05198, section 4.1: 5as / h of GPT-3 is 80."""
    line = activation_line(plan("model.preset=gpt3-175b", "data.sequence=2048", "batch.micro=1"))
    size = 2048 * 12288
    assert f"all {size * (34 + 80) / 1e6:,.2f} MB" in line and f"full {2 * size / 1e6:,.2f} MB" in line


class Mixer:
    """A layer of a user's own, whose names nobody knows here."""

    def __init__(self, *names, flops=0.0):
        self._specs = [Spec(name, (4, 4)) for name in names]
        self._flops = flops

    def parameters(self):
        return self._specs

    def flops(self, sequence):
        return self._flops


@pytest.mark.parametrize("flops", [96.0, 0.0])
def test_parts_of_a_layer_with_other_names_are_other(flops):
    layers = (Mixer("table.weight"), Mixer("mixer.weight", flops=flops), Mixer("head.norm", flops=flops))
    specs = [spec for layer in layers for spec in layer.parameters()]
    config = plan().config
    strange = SimpleNamespace(config=config, layers=layers, parameters=lambda: specs)
    parts = model_parts(strange)
    assert {name: (part.parameters, part.flops) for name, part in parts.items()} == {
        "other": (32, flops), "head": (16, flops)
    }  # fmt: skip
    assert "other" in parts_table(strange)


def test_memory_prints_them():
    text = show_memory(None, ("model.preset=smollm2-135m", "batch.global=8", "data.sequence=2048"), 1)
    row = next(line.split() for line in text.splitlines() if line.startswith("  head "))
    assert row == ["head", "576", "0.0", "576", "1.7e+08", "16.7", "2.78e+12"], row
    assert "a block of" in text and " 34 sbh, 2 sbh: all " in text

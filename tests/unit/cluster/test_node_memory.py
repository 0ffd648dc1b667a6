"""What is refused because a node has too little memory, and what isn't."""

import os

import pytest

from mpitrain import config as settings
from mpitrain.errors import ConfigError
from mpitrain.plan.predict.node_memory import require_memory
from mpitrain.plan.settings.resolve import resolve

NODE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fits(*given, training=True):
    """Whether a model may run, of which AdamW's state in fp32, 16 bytes a parameter, is 1.2 times
    the memory of a node.
    """
    from mpitrain.model.families.catalog import plan_of

    def resolved(layers):
        model = ("model.preset=llama3.2-1b", f"model.layers={layers}")
        layout = (
            "run.device=cpu",
            "run.save=blocking",
            "batch.global=64",
            "parallel.pp=1",
            "parallel.zero=0",
        )
        return resolve(settings.load(None, (*model, *layout, *given)), 64, 128256)

    one, two = (sum(spec.numel for spec in plan_of(resolved(layers)).parameters()) for layers in (1, 2))
    layers = round((1.2 * NODE / 16 - one) / (two - one)) + 1
    if layers < 2:
        pytest.skip("the smallest of these models is too large")
    try:
        require_memory(plan_of(resolved(layers)), training)
    except ConfigError:
        return False
    return True


def test_what_a_rank_keeps_at_least_has_to_fit():
    assert not fits()
    assert fits("optimizer.moments=bf16")
    assert fits("optimizer.name=sgd", "optimizer.momentum=0")
    assert not fits("optimizer.moments=bf16", "precision.compute=fp64")
    for zero in (1, 2, 3):
        assert fits(f"parallel.zero={zero}")


def test_a_copy_to_save_from_has_to_fit_too():
    assert fits("optimizer.moments=bf16")
    assert not fits("optimizer.moments=bf16", "run.save=background")
    assert fits("run.save=background", "parallel.zero=2")


def test_what_rank_0_saves_for_all_has_to_fit_too():
    assert fits("parallel.zero=1")
    assert not fits("parallel.zero=1", "run.shards=one")  # what is divided elsewhere is whole there
    assert fits("parallel.zero=1", "run.shards=node", "run.save=background")


def test_experts_are_on_several_nodes():
    mixture = ("model.family=mixtral", "model.width=512", "model.ffn=1024", "model.vocab=128256")
    assert not fits(*mixture)
    assert fits(*mixture, "parallel.ep=8")
    assert fits(*mixture, "parallel.zero=1")


def test_an_evaluation_needs_weights_alone():
    assert fits(training=False)  # a quarter of 1.2 nodes

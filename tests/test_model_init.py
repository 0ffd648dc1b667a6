import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpitrain.parallel.zero.initial import normal, uniforms


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_shard_equals_the_same_elements_of_the_whole(begin, length):
    whole = normal(3, "blocks.0.ffn.up.weight", 0, 1000, 0.02)
    assert torch.equal(normal(3, "blocks.0.ffn.up.weight", begin, begin + length, 0.02), whole[begin : begin + length])


def test_seed_and_name_give_other_numbers():
    streams = [uniforms(seed, name, 0, 100) for seed in (1, 2) for name in ("a", "b")]
    assert len({stream.tobytes() for stream in streams}) == 4


def test_numbers_are_normal():
    x = normal(1, "w", 0, 200_000, 2.0).numpy()
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 2.0) < 0.01
    assert abs((np.abs(x) < 2.0).mean() - 0.6827) < 0.005
    assert np.isfinite(x).all()


def test_first_numbers_are_fixed():
    """Raw Philox bits are stable over numpy versions; a change here changes every run."""
    assert uniforms(1, "embedding.weight", 0, 3).tolist() == FIRST


FIRST = [0.47433430808523497, 0.9807499407200486, 0.22969008693814202]


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_every_shard_of_a_layer_has_the_elements_of_the_whole(tp):
    """For any tensor-parallel degree, also one that doesn't divide the vocabulary; repeated key-value heads are equal."""
    from mpitrain import config as settings
    from mpitrain.layout.parameters import WHOLE, Shard
    from mpitrain.layout.resolve import resolve
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.parallel.zero.parameters import Parameter, initialise

    sizes = ("model.width=48", "model.heads=24", "model.kv_heads=4" if tp != 3 else "model.kv_heads=3", "model.ffn=48", "model.layers=2")
    config = resolve(settings.load(None, (*sizes, f"parallel.tp={tp}", "data.sequence=24", "model.vocab=259")), tp, 256)

    (stage,) = plan_of(config).stages

    def weights(shard):
        parameters = [Parameter(spec) for block in stage.specs(shard) for spec in block]
        for parameter in parameters:
            parameter.data = torch.empty(parameter.spec.shape, dtype=torch.float64)
        initialise(parameters, seed=3)
        return parameters

    whole = {parameter.name: parameter.data for parameter in weights(WHOLE)}
    covered = {name: torch.zeros(data.shape, dtype=torch.int64) for name, data in whole.items()}
    for rank in range(tp):
        for parameter in weights(Shard(rank, tp)):
            spec = parameter.spec
            box = tuple(slice(begin, begin + length) for begin, length in zip(spec.offset, spec.shape))
            assert parameter.data.equal(whole[spec.name][box]), spec
            if spec.copy == 0 and not (spec.name == "embedding.weight" and covered[spec.name][box].any()):  # tied: used twice
                covered[spec.name][box] += 1
    assert all(bool((count == 1).all()) for count in covered.values()), "each element belongs to one rank, and to one of its copies"

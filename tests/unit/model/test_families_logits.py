"""The logits of every family are those of `transformers`, to 1e-5 in fp32."""

import numpy as np
import pytest
from transformers_models import FILE, MODELS, TOKENS, plan, their_logits, weights


def our_model(name):
    import torch

    from mpitrain.actor.stage import Stage
    from mpitrain.model.build_context import BuildContext

    whole = plan(name)
    given = weights(name)
    stage = Stage(whole.stages[0], BuildContext(whole, torch.device("cpu")))
    for spec, data in stage.state.weights():
        data.copy_(given[spec.name])
    return stage


def our_logits(name, tokens=TOKENS):
    import torch

    from mpitrain.parallel.microbatch import Microbatch
    from mpitrain.parallel.walk import run

    stage = our_model(name)
    with torch.no_grad():
        return run(stage.forward(0, None, Microbatch(torch.tensor(tokens)))).numpy()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_that_transformers_has_computed(name):
    expected = np.load(FILE)[name]
    assert np.abs(our_logits(name) - expected).max() < 1e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", MODELS)
def test_the_file_is_what_transformers_computes(name):
    pytest.importorskip("transformers")
    assert np.abs(their_logits(name) - np.load(FILE)[name]).max() < 1e-5


def test_as_many_sequences_as_one_likes_go_through_a_model():
    """Generating, there is one, whatever batch.micro is; here there are two."""
    found = our_logits("deepseek-v3", 2 * TOKENS)
    assert np.array_equal(found[0], found[1])

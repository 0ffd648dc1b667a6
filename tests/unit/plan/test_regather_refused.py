"""Where parallel.regather would do nothing it is refused, with what to change."""

import pytest

from mpitrain import config as settings
from mpitrain.errors import ConfigError
from mpitrain.plan.settings.resolve import resolve

REFUSED = {
    "parallel.dp=2": "with parallel.tp = 1; leave it out, or use parallel.tp = 2",
    "parallel.tp=2 parallel.sequence=false": "with parallel.sequence = false; leave it out",
    "parallel.tp=2 parallel.async_tp=true": "with parallel.async_tp = true; leave it out",
    "parallel.tp=2 memory.recompute=full": 'with memory.recompute = "full", which gathers it again already',
    "parallel.tp=2 memory.recompute=every-k": 'with memory.recompute = "every-k", which gathers it again',
    "parallel.tp=2 model.family=deepseek-v3": "latent attention gathers narrow vectors",
}


@pytest.mark.parametrize(("given", "says"), REFUSED.items())
def test_a_layout_in_which_nothing_is_gathered_again_is_refused(given, says):
    config = settings.load(None, ("parallel.regather=true", *given.split()))
    with pytest.raises(ConfigError) as caught:
        resolve(config, 2, 256)
    assert says in str(caught.value) and "leave" in str(caught.value)

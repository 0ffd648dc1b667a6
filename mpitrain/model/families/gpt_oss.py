"""gpt-oss (arXiv:2508.10925, section 2).

Biases everywhere, sinks, a window in every other block, experts whose gates are clamped.
"""

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.kernels.gates import Clamped
from mpitrain.layout.family import ALL_ALIKE, OF_SOFTMAX, ROTARY, ModelFamily
from mpitrain.layout.layer import ModelLayers
from mpitrain.model.families.decoder import attentions, with_ends
from mpitrain.model.families.sparse import sparse_blocks

LIMIT = 7.0


def _gpt_oss(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model.

    Raises ConfigError where the biases of experts can't be divided.
    """
    model = config.model
    etp = config.parallel.etp
    if model.width % etp:
        raise ConfigError(
            f"model.width = {model.width}: the biases of experts don't divide over parallel.etp = {etp}; use "
            "a divisor"
        )
    attention = attentions(config, biased=True, biased_output=True, sinks=True)
    blocks = sparse_blocks(config, attention, model.eps, biased=True, gate=Clamped(LIMIT))
    return with_ends(config, blocks)


_PUBLISHED = dict(
    width=2880, heads=64, kv_heads=8, ffn=2880, vocab=201088, tied=False,
    attention=dict(head_width=64, yarn_factor=32.0, yarn_length=4096),
)  # fmt: skip

GPT_OSS = ModelFamily(
    name="gpt-oss",
    layers=_gpt_oss,
    attention=dict(ROTARY, theta=150_000.0, yarn_rounded=False, window=128, window_blocks="wf"),
    model=dict(eps=1e-5),
    experts=dict(ALL_ALIKE, **OF_SOFTMAX, count=32, active=4, balance="microbatch"),
    presets={
        "gpt-oss-20b": dict(_PUBLISHED, layers=24, experts=dict(count=32)),
        "gpt-oss-120b": dict(_PUBLISHED, layers=36, experts=dict(count=128)),
    },
)

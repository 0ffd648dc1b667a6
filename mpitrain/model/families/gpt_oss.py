"""gpt-oss (arXiv:2508.10925, section 2).

Biases everywhere, sinks, a window in every other block, experts whose gates are clamped.
"""

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.kernels.gates import Clamped
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.rope import rope_of
from mpitrain.plan.declared.family import ALL_ALIKE, OF_SOFTMAX, ROTARY, ModelFamily
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.settings.attention import head_width

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
    rope = rope_of(config.attention, head_width(config), rounded=False)
    attention = [
        Attention(
            model.width,
            model.heads,
            model.kv_heads,
            rope,
            2 * model.layers,
            biased=True,
            window=window,
            sinks=True,
        )
        for window in (config.attention.window, 0)
    ]
    first, last = (end(model.vocab, model.width, model.tied) for end in (Embedding, Head))
    return ModelLayers(first, sparse_blocks(config, attention, biased=True, gate=Clamped(LIMIT)), last)


_PUBLISHED = dict(
    width=2880, heads=64, kv_heads=8, ffn=2880, vocab=201088, tied=False,
    attention=dict(head_width=64, yarn_factor=32.0, yarn_length=4096),
)  # fmt: skip

GPT_OSS = ModelFamily(
    name="gpt-oss",
    layers=_gpt_oss,
    attention=dict(ROTARY, theta=150_000.0, window=128),
    experts=dict(ALL_ALIKE, **OF_SOFTMAX, count=32, active=4, balance="microbatch"),
    presets={
        "gpt-oss-20b": dict(_PUBLISHED, layers=24, experts=dict(count=32)),
        "gpt-oss-120b": dict(_PUBLISHED, layers=36, experts=dict(count=128)),
    },
)

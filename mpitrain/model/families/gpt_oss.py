"""gpt-oss (arXiv:2508.10925, section 2).

Biases everywhere, sinks, a window in every other block, experts whose gates are clamped.
"""

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.layout.attention import head_width
from mpitrain.layout.layer import Family
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.rope import rope_of

LIMIT = 7.0


def gpt_oss(config: Config) -> Family:
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
    return Family(first, sparse_blocks(config, attention, biased=True, limit=LIMIT), last)

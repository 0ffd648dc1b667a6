"""Llama (arXiv:2302.13971, 2307.09288).

Attention and a gated feed-forward, each behind a norm, around the residual stream.
"""

from mpitrain.config import Config
from mpitrain.layout.attention import head_width
from mpitrain.layout.layer import Family
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.feed_forward import FeedForward
from mpitrain.model.layers.rope import rope_of


def llama(config: Config) -> Family:
    """Return the layers of a resolved configuration's model."""
    model = config.model
    depth = 2 * model.layers
    attention = Attention(
        model.width, model.heads, model.kv_heads, rope_of(config.attention, head_width(config)), depth
    )
    block = attention, FeedForward(model.width, model.ffn, depth)
    first, last = (end(model.vocab, model.width, model.tied) for end in (Embedding, Head))
    return Family(first, model.layers * (block,), last)

"""Mixtral (arXiv:2401.04088): Llama's attention, and experts instead of its feed-forward."""

from mpitrain.config import Config
from mpitrain.layout.attention import head_width
from mpitrain.layout.layer import Family
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.rope import rope_of


def mixtral(config: Config) -> Family:
    """Return the layers of a resolved configuration's model."""
    model = config.model
    rope = rope_of(config.attention, head_width(config))
    attention = Attention(model.width, model.heads, model.kv_heads, rope, 2 * model.layers)
    first, last = (end(model.vocab, model.width, model.tied) for end in (Embedding, Head))
    return Family(first, sparse_blocks(config, [attention]), last)

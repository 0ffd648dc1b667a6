"""Qwen3 (arXiv:2505.09388, section 2): Llama with heads as wide as one likes, whose queries and keys are normed."""

from mpitrain.config import Config
from mpitrain.layout.attention import head_width
from mpitrain.layout.layer import Family
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.feed_forward import FeedForward
from mpitrain.model.layers.rope import rope_of

EPS = 1e-6


def qwen3(config: Config) -> Family:
    """Return the layers of a resolved configuration's model."""
    model = config.model
    block = attention(config), FeedForward(model.width, model.ffn, 2 * model.layers, EPS)
    first, last = Embedding(model.vocab, model.width, model.tied), Head(model.vocab, model.width, model.tied, EPS)
    return Family(first, model.layers * (block,), last)


def attention(config: Config) -> Attention:
    """Return the layer of attention."""
    model, rope = config.model, rope_of(config.attention, head_width(config))
    return Attention(model.width, model.heads, model.kv_heads, rope, 2 * model.layers, EPS, normed=True)

"""Qwen3 (arXiv:2505.09388, section 2).

Llama with heads as wide as one likes, whose queries and keys are normed; dense, or with experts.
"""

from mpitrain.config import Config
from mpitrain.layout.attention import head_width
from mpitrain.layout.layer import Family, Layer
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.feed_forward import FeedForward
from mpitrain.model.layers.rope import rope_of

EPS = 1e-6


def qwen3(config: Config) -> Family:
    """Return the layers of a resolved configuration's model."""
    model = config.model
    block = _attention(config), FeedForward(model.width, model.ffn, 2 * model.layers, EPS)
    return _family(config, model.layers * (block,))


def qwen3_moe(config: Config) -> Family:
    """Return the layers of a resolved configuration's model."""
    return _family(config, sparse_blocks(config, [_attention(config)], EPS))


def _attention(config: Config) -> Attention:
    model = config.model
    rope = rope_of(config.attention, head_width(config))
    return Attention(model.width, model.heads, model.kv_heads, rope, 2 * model.layers, EPS, normed=True)


def _family(config: Config, blocks: tuple[tuple[Layer, ...], ...]) -> Family:
    vocab = config.model.vocab
    width = config.model.width
    tied = config.model.tied
    return Family(Embedding(vocab, width, tied), blocks, Head(vocab, width, tied, EPS))

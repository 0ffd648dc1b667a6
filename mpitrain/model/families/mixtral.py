"""Mixtral (arXiv:2401.04088): Llama's attention, and experts instead of its feed-forward."""

from mpitrain.config import Config
from mpitrain.layout.layer import Family
from mpitrain.model.layers.attention import Attention
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.experts import Experts
from mpitrain.model.layers.feed_forward import FeedForward


def mixtral(config: Config) -> Family:
    """Return the layers of a resolved configuration's model."""
    model, experts = config.model, config.experts
    depth = 2 * model.layers
    attention = Attention(model.width, model.heads, model.kv_heads, depth)
    sparse, dense = Experts(model.width, experts, depth), FeedForward(model.width, model.ffn, depth)
    has_experts = [number >= experts.first and (number - experts.first + 1) % experts.every == 0 for number in range(model.layers)]
    first, last = (end(model.vocab, model.width, model.tied) for end in (Embedding, Head))
    return Family(first, tuple((attention, sparse if each else dense) for each in has_experts), last)

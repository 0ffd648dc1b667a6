"""DeepSeek-V3 (arXiv:2412.19437, section 2.1).

Latent attention; experts, some of which all tokens meet, behind a few dense blocks.
"""

from mpitrain.config import Config
from mpitrain.layout.attention import head_width
from mpitrain.layout.layer import Family
from mpitrain.model.families.sparse import sparse_blocks
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.model.layers.latent_attention import LatentAttention
from mpitrain.model.layers.rope import rope_of

EPS = 1e-6


def deepseek_v3(config: Config) -> Family:
    """Return the layers of a resolved configuration's model."""
    model = config.model
    own = config.attention
    sizes = head_width(config), own.value_width, own.q_rank, own.kv_rank
    attention = LatentAttention(
        model.width, model.heads, *sizes, rope_of(own, own.rotary_width), 2 * model.layers, EPS
    )
    first = Embedding(model.vocab, model.width, model.tied)
    last = Head(model.vocab, model.width, model.tied, EPS)
    return Family(first, sparse_blocks(config, [attention], EPS), last)

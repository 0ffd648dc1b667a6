"""Qwen3 (arXiv:2505.09388, section 2).

Llama with heads as wide as one likes, whose queries and keys are normed; dense, or with experts.
"""

from mpitrain.config import Config
from mpitrain.layout.family import ALL_ALIKE, OF_SOFTMAX, ROTARY, WINDOWS, ModelFamily
from mpitrain.layout.layer import ModelLayers
from mpitrain.model.families.decoder import attentions, decoder, with_ends
from mpitrain.model.families.names import BIASES, DENSE, HUGGING_FACE, NORMS_OF_HEADS, ROUTED
from mpitrain.model.families.sparse import sparse_blocks

NORMED = True  # queries and keys, of each head


def _qwen3(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    return decoder(config, normed=NORMED)


def _qwen3_moe(config: Config) -> ModelLayers:
    """Return the layers of a resolved configuration's model."""
    return with_ends(config, sparse_blocks(config, attentions(config, normed=NORMED), config.model.eps))


_KEYS = dict(ROTARY, **WINDOWS, theta=1_000_000.0, biases="none")
_PUBLISHED = dict(kv_heads=4, vocab=151936, tied=False, attention=dict(head_width=128))

QWEN3 = ModelFamily(
    name="qwen3",
    layers=_qwen3,
    attention=_KEYS,
    model=dict(eps=1e-6),
    weight_names={HUGGING_FACE: DENSE | BIASES | NORMS_OF_HEADS},
)
QWEN3_MOE = ModelFamily(
    name="qwen3-moe",
    layers=_qwen3_moe,
    attention=_KEYS,
    model=dict(eps=1e-6),
    experts=dict(ALL_ALIKE, **OF_SOFTMAX, count=128, active=8, balance="global"),
    # blocks that experts.every leaves without experts have a feed-forward
    weight_names={HUGGING_FACE: DENSE | BIASES | NORMS_OF_HEADS | ROUTED},
    presets={
        "qwen3-30b-a3b": dict(_PUBLISHED, layers=48, width=2048, heads=32, ffn=6144, experts=dict(width=768)),
        "qwen3-235b-a22b": dict(
            _PUBLISHED, layers=94, width=4096, heads=64, ffn=12288, experts=dict(width=1536)
        ),
    },
)

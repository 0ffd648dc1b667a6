"""SmolLM3 (huggingface.co/blog/smollm3): Llama whose every fourth block has no positions
(RNoPE, arXiv:2501.18795).
"""

from mpitrain.layout.family import ROTARY, WINDOWS, ModelFamily
from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.names import BIASES, DENSE, FEED_FORWARD_BIASES, HUGGING_FACE

SMOLLM3 = ModelFamily(
    name="smollm3",
    layers=decoder,
    attention=dict(ROTARY, **WINDOWS, theta=2_000_000.0, rotary_blocks="rrrn", biases="none"),
    model=dict(eps=1e-6, ffn_biased=False),
    weight_names={HUGGING_FACE: DENSE | BIASES | FEED_FORWARD_BIASES},
    presets={
        "smollm3-3b": dict(
            layers=36, width=2048, heads=16, kv_heads=4, ffn=11008, vocab=128256, tied=True,
            attention=dict(theta=5_000_000.0),
        ),
    },
)  # fmt: skip

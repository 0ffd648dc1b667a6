"""Names of weights in Hugging Face folders, of the layers that families share (transformers 5.24).

Ours on the left, theirs on the right: {block} is the number of a block, {expert} of an expert, each
of which is a tensor of its own there. A weight that is stored otherwise (gpt-oss's experts, the
rotary rows of DeepSeek) has a Stored (plan/declared/hugging_face.py) instead of a name.
"""

from collections.abc import Mapping
from typing import TypeVar

from mpitrain.plan.declared.hugging_face import FORMAT, Stored

HUGGING_FACE = FORMAT
Form = TypeVar("Form", str, Stored)
BLOCK = "model.layers.{block}."  # before names of a block
ENDS = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def in_block(names: Mapping[str, Form]) -> dict[str, Form]:
    """Return names of weights of a block, its own in front; that of a Stored is whole already."""
    return {
        f"blocks.{{block}}.{ours}": f"{BLOCK}{theirs}" if isinstance(theirs, str) else theirs
        for ours, theirs in names.items()
    }


def _attention(kind: str) -> dict[str, str]:
    """Return names of the products of attention. kind: weight or bias."""
    own = {f"attention.{name}.{kind}": f"self_attn.{name}_proj.{kind}" for name in "qkv"}
    return in_block(own | {f"attention.output.{kind}": f"self_attn.o_proj.{kind}"})


def _gated(ours: str, theirs: str, kind: str = "weight") -> dict[str, str]:
    """Return names of the products of a gated feed-forward."""
    return in_block(
        {f"ffn.{ours}{name}.{kind}": f"mlp.{theirs}{name}_proj.{kind}" for name in ("gate", "up", "down")}
    )


NORMS = in_block(
    {"attention.norm.weight": "input_layernorm.weight", "ffn.norm.weight": "post_attention_layernorm.weight"}
)
ATTENTION = _attention("weight")
BIASES = _attention("bias")
# after attention; before the feed-forward, where Llama's name is after attention; after it (Gemma)
NORMS_AROUND = in_block(
    {
        "attention.post_norm.weight": "post_attention_layernorm.weight",
        "ffn.norm.weight": "pre_feedforward_layernorm.weight",
        "ffn.post_norm.weight": "post_feedforward_layernorm.weight",
    }
)
NORMS_OF_HEADS = in_block({f"attention.{name}_norm.weight": f"self_attn.{name}_norm.weight" for name in "qk"})
FEED_FORWARD = _gated("", "")
FEED_FORWARD_BIASES = _gated("", "", "bias")
ROUTED = in_block({"ffn.router.weight": "mlp.gate.weight"}) | _gated("experts.", "experts.{expert}.")
DENSE = ENDS | NORMS | ATTENTION | FEED_FORWARD
# shared experts, and the router's bias, which transformers keeps in fp32 whatever the others have
SHARED_AND_BIAS = _gated("shared.", "shared_experts.") | in_block(
    {"ffn.router.bias": Stored(f"{BLOCK}mlp.gate.e_score_correction_bias", exact=True)}
)

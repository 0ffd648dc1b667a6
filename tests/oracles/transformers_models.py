"""Small models of every family, as mpitrain is configured for them and as `transformers` (5.23.0)
has them, with the same random weights.

    python tests/oracles/transformers_models.py  computes the logits by transformers and writes them to
                                         tests/golden/logits.npz

test_families_logits.py compares with that file, and where transformers is installed with itself.
Names are mapped from ours to theirs; what they store otherwise is turned on the way: gate and up in
one matrix, pairs of rotary features next to each other.
"""

import re

import numpy as np
from folders import GOLDEN

FILE = GOLDEN / "logits.npz"
VOCAB, LENGTH = 24, 20
TOKENS = [[(7 * i * i + 3 * i + 5) % VOCAB for i in range(LENGTH)]]
SIZES = dict(layers=3, width=32, heads=4, kv_heads=2, ffn=40)
THEIR_SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=40,
    max_position_embeddings=64, attn_implementation="eager",
)  # fmt: skip
YARN = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=2048, beta_fast=32.0, beta_slow=1.0
)
OUR_YARN = dict(yarn_factor=4.0, yarn_length=2048)
LATENT = dict(head_width=12, kv_rank=10, rotary_width=6, value_width=8)
THEIR_LATENT = dict(
    num_key_value_heads=4, kv_lora_rank=10, qk_rope_head_dim=6, v_head_dim=8, qk_nope_head_dim=12,
    moe_intermediate_size=12,
    rope_parameters=dict(YARN, rope_theta=10_000.0, mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
MODELS = {  # name: (its configuration in transformers, keys there, our family, our tables)
    "mistral": ("MistralConfig", dict(sliding_window=None, rms_norm_eps=1e-5), "llama", {}),
    "llama3.1": (
        "LlamaConfig",
        dict(
            rms_norm_eps=1e-5,
            rope_parameters=dict(
                rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=60,
            ),
        ),
        "llama", dict(attention=dict(theta=500.0, llama3_factor=8.0, llama3_length=60)),
    ),
    "qwen3": ("Qwen3Config", dict(head_dim=16, rope_theta=1e6), "qwen3", dict(attention=dict(head_width=16))),
    "mixtral": (
        "MixtralConfig", dict(num_local_experts=4, rope_theta=1e6), "mixtral",
        dict(attention=dict(theta=1e6), experts=dict(count=4)),
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, head_dim=16,
            norm_topk_prob=True, rope_theta=1e6),
        "qwen3-moe", dict(attention=dict(head_width=16), experts=dict(count=8, active=3, width=12)),
    ),
    "deepseek-v3-dense": (
        "DeepseekV3Config", dict(THEIR_LATENT, first_k_dense_replace=3, q_lora_rank=None), "deepseek-v3",
        dict(attention=dict(LATENT, **OUR_YARN, q_rank=0), experts=dict(first=3)),
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        dict(THEIR_LATENT, first_k_dense_replace=1, q_lora_rank=20, n_routed_experts=8, n_group=4,
            topk_group=2, num_experts_per_tok=3),
        "deepseek-v3",
        dict(attention=dict(LATENT, **OUR_YARN, q_rank=20),
            experts=dict(first=1, count=8, active=3, groups=4, groups_active=2, width=12)),
    ),
    "gpt-oss": (
        "GptOssConfig",
        dict(
            num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=5,
            rope_parameters=dict(YARN, rope_theta=150_000.0, truncate=False),
        ),
        "gpt-oss", dict(attention=dict(**OUR_YARN, head_width=16, window=5), experts=dict(count=4, active=2)),
    ),
}  # fmt: skip
NAMES = {  # ours: theirs, within a block
    "attention.norm.weight": "input_layernorm.weight", "ffn.norm.weight": "post_attention_layernorm.weight",
    "attention.sinks": "self_attn.sinks", "attention.output.weight": "self_attn.o_proj.weight",
    "attention.output.bias": "self_attn.o_proj.bias",
    **{f"attention.{n}.{kind}": f"self_attn.{n}_proj.{kind}" for n in "qkv" for kind in ("weight", "bias")},
    **{f"attention.{n}_norm.weight": f"self_attn.{n}_norm.weight" for n in "qk"},
    **{f"ffn.{n}.weight": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
    **{f"ffn.shared.{n}.weight": f"mlp.shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")},
    "ffn.router.weight": "mlp.gate.weight", "ffn.router.bias": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
OF_LATENT = {
    "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj", "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
}  # fmt: skip
OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def weights(name):
    """Return the model's weights by our names.

    Such that nothing is near 0 or 1, and experts are chosen clearly.
    """
    import torch

    from mpitrain.parallel.zero.initial import normal

    found = {}
    for spec in plan(name).parameters():
        short = re.sub(r"^blocks\.\d+\.", "", spec.name)
        x = normal(1, spec.name, 0, spec.numel, 1.0).view(spec.shape)
        if short.endswith("norm.weight"):
            x = 1 + 0.2 * x
        elif short.endswith("ffn.experts.gate.weight"):
            x = 0.8 * x  # some are beyond the limit of gpt-oss
        elif len(spec.shape) > 1 and short != "embedding.weight":
            x = x / spec.shape[-1] ** 0.5
        elif short.endswith("bias"):
            x = 0.3 * x
        found[spec.name] = x.to(torch.float32)
    return found


def plan(name):
    """Return the plan of a model on one rank."""
    from mpitrain import config as settings
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    *_, family, tables = MODELS[name]
    sizes = {
        key: value for key, value in SIZES.items() if not (family == "deepseek-v3" and key == "kv_heads")
    }
    tree = {
        "model": dict(sizes, family=family, vocab=VOCAB, tied=False),
        "data": {"sequence": LENGTH},
        "batch": {"global": 1},
        **tables,
    }
    return plan_of(resolve(settings.parse(tree), 1, VOCAB))


def their_weights(name):
    """Return the same weights as a state dict of transformers."""
    import torch

    own = weights(name)
    found = {}
    layer = plan(name).model.blocks[0][0]
    for block in range(SIZES["layers"]):
        start = f"blocks.{block}."
        prefix = f"model.layers.{block}."
        p = {key.removeprefix(start): x for key, x in own.items() if key.startswith(start)}
        if "attention.kv_up.weight" in p:
            for short, width in (("q_up", layer.key_width), ("kv_down", sum(layer.latent_widths[1:]))):
                p[f"attention.{short}.weight"] = side_by_side(
                    p[f"attention.{short}.weight"], width, layer.rope.width
                )
            for short, theirs in OF_LATENT.items():
                theirs = "q_proj" if short == "q_up" and not layer.q_rank else theirs
                if (name := f"attention.{short}.weight") in p:
                    found[f"{prefix}self_attn.{theirs}.weight"] = p.pop(name)
        # gpt-oss: products with the inputs first, gate and up in turns
        if "ffn.router.logit_bias" in p:
            found[prefix + "mlp.router.weight"] = p.pop("ffn.router.weight")
            found[prefix + "mlp.router.bias"] = p.pop("ffn.router.logit_bias")
            for kind in ("weight", "bias"):
                both = torch.stack(
                    [p.pop(f"ffn.experts.{each}.{kind}") for each in ("gate", "up")], 2
                ).flatten(1, 2)
                down = p.pop(f"ffn.experts.down.{kind}")
                end = "" if kind == "weight" else "_bias"
                found[f"{prefix}mlp.experts.gate_up_proj{end}"] = both.mT if kind == "weight" else both
                found[f"{prefix}mlp.experts.down_proj{end}"] = down.mT if kind == "weight" else down
        elif "ffn.experts.gate.weight" in p:
            both = torch.cat([p.pop(f"ffn.experts.{each}.weight") for each in ("gate", "up")], 1)
            found[prefix + "mlp.experts.gate_up_proj"] = both
            found[prefix + "mlp.experts.down_proj"] = p.pop("ffn.experts.down.weight")
        found |= {prefix + NAMES[key]: x for key, x in p.items() if key != "ffn.router.load"}
    return found | {theirs: own[ours] for ours, theirs in OUTSIDE.items()}


def side_by_side(rows, group, rotary):
    """Return rows with the last `rotary` of each group, which are halves here, as pairs next to
    each other.
    """
    x = rows.unflatten(0, (-1, group)).clone()
    x[:, group - rotary :] = x[:, group - rotary :].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return x.flatten(0, 1)


def their_model(name):
    """Return the model of transformers, with the same weights."""
    import transformers

    kind, keys, *_ = MODELS[name]
    config = getattr(transformers, kind)(**{**THEIR_SIZES, **keys}, tie_word_embeddings=False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict(their_weights(name), strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    return model


def their_logits(name):
    """Return the logits by transformers, [1, LENGTH, VOCAB]."""
    import torch

    model = their_model(name)
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


if __name__ == "__main__":
    np.savez(FILE, **{name: their_logits(name) for name in MODELS})
    print(f"{FILE}: {', '.join(MODELS)}")

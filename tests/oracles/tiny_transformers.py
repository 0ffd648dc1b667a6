"""Tiny random models, as transformers writes them, and the logits that it computes of them.

All weights are random, norms, biases and sinks too: a lost or a misplaced one shows. In fp64 transformers
computes norms, rotary positions and routers in fp32; double() has it compute everything in fp64.
"""

import json
from contextlib import contextmanager

import numpy as np
from transformers_models import LENGTH, MODELS, THEIR_SIZES

VOCAB = 300  # more than bytes have
TOKENS = [[(7 * i * i + 3 * i + 5) % VOCAB for i in range(LENGTH)]]
GLM = dict(
    n_routed_experts=8, num_experts_per_tok=3, n_group=1, topk_group=1, moe_intermediate_size=12, head_dim=12,
    rope_parameters=dict(rope_type="default", rope_theta=10_000.0, partial_rotary_factor=0.5),
)  # fmt: skip
LLAMA3 = MODELS["llama3.1"][1]["rope_parameters"]
YARN = dict(rope_type="yarn", rope_theta=10_000.0, factor=4.0, original_max_position_embeddings=16)
# name: class of its configuration, keys; besides those of transformers_models.py
CASES = {name: (kind, keys) for name, (kind, keys, *_) in MODELS.items()} | {
    "llama-tied": ("LlamaConfig", dict(rms_norm_eps=1e-5, tie_word_embeddings=True)),
    "llama-one-kv-head": ("LlamaConfig", dict(rms_norm_eps=1e-5, num_key_value_heads=1, head_dim=12)),
    "llama-yarn": ("LlamaConfig", dict(rms_norm_eps=1e-5, rope_parameters=YARN)),
    "llama-dynamic": (  # TOKENS are longer
        "LlamaConfig",
        dict(rms_norm_eps=1e-5, max_position_embeddings=LENGTH // 2,
            rope_parameters=dict(rope_type="dynamic", rope_theta=500.0, factor=3.0)),
    ),
    "llama-yarn-sharper": (
        "LlamaConfig",
        dict(rms_norm_eps=1e-5, rope_parameters=dict(YARN, attention_factor=1.3)),
    ),
    "qwen3-tied": ("Qwen3Config", dict(head_dim=16, tie_word_embeddings=True)),
    "qwen3-moe-some": (
        "Qwen3MoeConfig",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=8,
            norm_topk_prob=False, mlp_only_layers=[0]),
    ),
    "gpt-oss-plain": (
        "GptOssConfig",
        dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=7,
            rope_parameters=dict(rope_type="default", rope_theta=10_000.0)),
    ),
    "deepseek-v3-none-shared": ("DeepseekV3Config", dict(MODELS["deepseek-v3"][1], n_shared_experts=0)),
    "deepseek-v3-eps": ("DeepseekV3Config", dict(MODELS["deepseek-v3"][1], rms_norm_eps=1e-2)),
    # GLM-4.5-Air, and GLM-4.5: norms of queries and keys, some blocks more without experts, a factor
    "glm-4.5-air": (
        "Glm4MoeConfig",
        dict(GLM, attention_bias=True, first_k_dense_replace=1, n_shared_experts=1, rms_norm_eps=1e-5),
    ),
    "glm-4.5": (
        "Glm4MoeConfig",
        dict(GLM, attention_bias=True, use_qk_norm=True, first_k_dense_replace=2, n_shared_experts=2,
            routed_scaling_factor=2.5),
    ),
}  # fmt: skip


def save(name, path, dtype="float32", **more):
    """Write a model of CASES, of random weights in `dtype`, as transformers does."""
    import torch
    import transformers

    kind, keys = CASES[name]
    given = {**THEIR_SIZES, "tie_word_embeddings": False, **keys, "vocab_size": VOCAB, **more}
    config = getattr(transformers, kind)(**given)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    biases = [(name, x) for name, x in model.named_buffers() if "correction_bias" in name]
    with torch.no_grad():
        for name, x in [*model.named_parameters(), *biases]:
            random = torch.randn_like(x)
            if "correction_bias" in name:
                x.copy_(0.02 * random)  # a large one chooses the same groups for all tokens
            elif "norm" in name:
                x.copy_(1 + 0.2 * random)
            else:
                x.copy_(0.3 * random)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    return path


@contextmanager
def double():
    """Have transformers compute in fp64 what it computes in fp32 whatever the weights are."""
    import torch

    kept = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)  # of a number times a length
    try:
        yield
    finally:
        torch.set_default_dtype(kept[0])
        torch.float32, torch.float, torch.Tensor.float = kept


def their_logits(path, dtype="float32", tokens=TOKENS):
    """Return the logits by transformers, and the names of weights that it misses or doesn't know."""
    import torch
    import transformers

    of_experts = "expert" in json.dumps(json.loads((path / "config.json").read_text()))
    more = dict(experts_implementation="eager") if of_experts else {}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager", output_loading_info=True, **more
    )
    with torch.no_grad():
        logits = model.eval()(torch.tensor(tokens)).logits.numpy()
    return logits, {name for kind in ("missing_keys", "unexpected_keys") for name in info[kind]}


def our_plan(path, compute="fp32", tokens=TOKENS, **tables):
    """Return the plan of a Hugging Face folder's model on one rank. tables: of its configuration."""
    from mpitrain import config as settings
    from mpitrain.config import LoadedConfig
    from mpitrain.origins import SET, KeyOrigin, Origins
    from mpitrain.weights.beginning import begins
    from mpitrain.weights.keys import plan_on_one_rank

    tree = {
        "model": {"init": str(path)},
        "data": {"sequence": len(tokens[0]), "tokenizer": "bytes"},
        "batch": {"global": 1},
        "precision": {"compute": compute},
        **tables,
    }
    given = Origins(dict.fromkeys(["data.sequence", "data.tokenizer"], KeyOrigin(SET)))
    return plan_on_one_rank(begins(LoadedConfig(settings.parse(tree), given)).given.config)


def our_logits(path, compute="fp32", tokens=TOKENS, **tables):
    """Return our logits of a Hugging Face folder, by the way that model.init takes."""
    import torch

    from mpitrain.actor.stage import Stage
    from mpitrain.model.build_context import BuildContext
    from mpitrain.parallel.microbatch import Microbatch
    from mpitrain.parallel.walk import run
    from mpitrain.weights.beginning import source_of

    plan = our_plan(path, compute, tokens, **tables)
    stage = Stage(plan.stages[0], BuildContext(plan, torch.device("cpu")))
    source = source_of(str(path), plan)
    for spec, data in stage.state.weights():
        if (box := source.box(spec.name)) is not None:
            source.read(spec.name, box, data.numpy())
    source.close()
    with torch.no_grad():
        return run(stage.forward(0, None, Microbatch(torch.tensor(tokens)))).numpy()


def distance(found, expected):
    """Return the largest difference, of the largest number or 1."""
    return np.abs(found - expected).max() / max(1.0, np.abs(expected).max())

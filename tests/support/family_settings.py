"""Settings under which each dense family and GLM-4.5 shows all that is its own, at a width of 16."""

GEMMA = (
    "model.kv_heads=2", "attention.head_width=6", "attention.score_width=5", "attention.window=5",
    "attention.biases=all",
)  # fmt: skip
FAMILIES = {
    "llama": (
        "model.kv_heads=2", "attention.head_width=6", "attention.biases=all", "model.ffn_biased=true",
        "model.eps=1e-3", "attention.theta=50", "attention.llama3_factor=4", "attention.llama3_length=16",
    ),
    "mistral": ("model.kv_heads=2", "attention.window=5", "attention.linear_factor=3", "model.tied=false"),
    "qwen2": (
        "model.kv_heads=2", "attention.window=5", "attention.window_blocks=ffw", "attention.theta=50",
        "attention.yarn_factor=4", "attention.yarn_length=16", "attention.yarn_fast=4",
        "attention.yarn_slow=0.5", "attention.yarn_rounded=false",
    ),
    "smollm3": ("model.kv_heads=2", "attention.rotary_blocks=rn", "model.ffn_biased=true"),
    "gemma2": (*GEMMA, "attention.score_cap=0.05", "model.logit_cap=0.1"),
    "olmo2": (
        "model.kv_heads=2", "attention.head_width=6", "attention.dynamic_factor=2",
        "attention.dynamic_length=6",
    ),
    "olmo3": ("model.kv_heads=2", "attention.window=5", "attention.window_blocks=wf"),
    "gpt2": ("model.positions=20",),
    "glm-4.5": (
        "model.kv_heads=2", "attention.head_width=8", "attention.normed=true", "experts.count=4",
        "experts.active=2", "experts.width=12", "experts.balance=none", "experts.balance_weight=0",
        "experts.scale=1.5",
    ),
    "gemma3": (*GEMMA, "attention.window_blocks=wwf", "attention.window_theta=100"),
}  # fmt: skip

"""The models of benchmarks/gpu_first.py and gpu_steps.py: one that fills a GPU, and one of no use."""

LARGE = {
    "model.preset": "llama3.2-1b",
    "data.sequence": 2048,
    "batch.micro": 4,
    "batch.global": 64,
    "precision.compute": "bf16",
}
SMALL = {
    "model.preset": "quickstart", "model.layers": 2, "model.width": 32, "model.ffn": 64, "model.heads": 2,
    "model.kv_heads": 1,
    "data.sequence": 32, "batch.micro": 2, "batch.global": 8, "precision.compute": "bf16",
}  # fmt: skip

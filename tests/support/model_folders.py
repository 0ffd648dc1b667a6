"""Folders of a small Llama as the Hugging Face libraries write them, in one file or in shards."""

import json
import struct

import numpy as np

CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=16, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, intermediate_size=24, vocab_size=40, hidden_act="silu",
    rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None, tie_word_embeddings=False,
    torch_dtype="float32", max_position_embeddings=64, attention_bias=False, mlp_bias=False,
    bos_token_id=1, eos_token_id=[2, 3],
)  # fmt: skip
BLOCK = {
    "self_attn.q_proj.weight": (16, 16), "self_attn.k_proj.weight": (8, 16),
    "self_attn.v_proj.weight": (8, 16), "self_attn.o_proj.weight": (16, 16),
    "mlp.gate_proj.weight": (24, 16), "mlp.up_proj.weight": (24, 16), "mlp.down_proj.weight": (16, 24),
    "input_layernorm.weight": (16,), "post_attention_layernorm.weight": (16,),
}  # fmt: skip
SHAPES = {"model.embed_tokens.weight": (40, 16), "model.norm.weight": (16,), "lm_head.weight": (40, 16)}
SHAPES |= {f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in BLOCK.items()}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def tensors(vocabulary=40):
    numbers = np.random.default_rng(0)
    rows = {name: (vocabulary, 16) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    shapes = SHAPES | rows
    return {name: numbers.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}


def header(entries):
    content = json.dumps(entries).encode()
    return struct.pack("<Q", len(content)) + content


def entries_of(arrays, code="F32"):
    found, at = {}, 0
    for name, x in arrays.items():
        found[name] = {"dtype": code, "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    return found


def write(path, arrays, change=lambda entries: None, data=b"", code="F32"):
    """Write a safetensors file; `change` may alter its header, `data` is added after it."""
    entries = entries_of(arrays, code)
    changed = change(entries)
    content = b"".join(x.tobytes() for x in arrays.values())
    path.write_bytes(header(entries if changed is None else changed) + content + data)


def folder(path, vocabulary=40, **changes):
    """Write a whole model in one file."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocabulary, **changes}))
    write(path / SINGLE, tensors(vocabulary))
    return path


def sharded(path):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    every = list(tensors().items())
    parts = [dict(every[:8]), dict(every[8:])]
    for name, part in zip(SHARDS, parts):
        write(path / name, part)
    where = {name: shard for shard, part in zip(SHARDS, parts) for name in part}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return path

"""What import and export cost: peak memory and time, of a model of 1.5 G parameters on one rank.

    python benchmarks/weights.py [FOLDER] [LAYERS]      FOLDER: where 12 GB are free; LAYERS: 28

It makes a Hugging Face folder in bf16 of the sizes of Qwen2.5-1.5B (random numbers), imports it, and exports
the run. Before each, a process of its own copies as many bytes: reads what the command reads, writes as much
as it writes, in pieces of 8 MB, and syncs once a file. The page cache is as full for one as for the other.

    memory   the most that was resident in the process, less the bound: the largest tensor + 300 MB
    time     of the command, over that of the copy; of export, of what it writes before the proof, too
    cpu      seconds of processor time, which other programs on the machine change less
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.weights.header import header_of

SIZES = dict(hidden_size=1536, num_attention_heads=12, num_key_value_heads=2, intermediate_size=8960,
    vocab_size=151936)  # fmt: skip
FIXED = dict(architectures=["LlamaForCausalLM"], model_type="llama", rms_norm_eps=1e-5, hidden_act="silu",
    tie_word_embeddings=True, torch_dtype="bfloat16", max_position_embeddings=4096)  # fmt: skip
PIECE = 1 << 23
BOUND = 300 * 10**6
COPY = """
import os, sys
source, target, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
files = sorted(os.path.join(at, name) for at, _, names in os.walk(source) for name in names)
out = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
written, piece = 0, b""
for file in files:
    with open(file, "rb", buffering=0) as reading:
        while piece := reading.read(1 << 23):
            if written < wanted:
                written += os.write(out, piece[: wanted - written])
            last = piece
while written < wanted:
    written += os.write(out, last[: wanted - written])
os.fsync(out)
"""


class CopyCost(NamedTuple):
    """What a process took: seconds, seconds of processor time, bytes resident at most."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    output: str


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the model."""
    width, ffn = SIZES["hidden_size"], SIZES["intermediate_size"]
    kv = width // SIZES["num_attention_heads"] * SIZES["num_key_value_heads"]
    block = {
        "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (width, width), "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width), "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (ffn, width), "mlp.up_proj.weight": (ffn, width),
        "mlp.down_proj.weight": (width, ffn),
    }  # fmt: skip
    found = {"model.embed_tokens.weight": (SIZES["vocab_size"], width), "model.norm.weight": (width,)}
    return found | {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in block.items()}


def make(folder: Path, layers: int) -> int:
    """Write the model; return the bytes of the largest tensor."""
    folder.mkdir()
    tensors = shapes(layers)
    (folder / "config.json").write_text(json.dumps({**FIXED, **SIZES, "num_hidden_layers": layers}))
    # bits of bf16 numbers below 1 in absolute value
    random = np.random.default_rng(0).integers(0x3C00, 0x3E00, PIECE // 2, dtype=np.uint16)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header_of((name, "BF16", shape) for name, shape in tensors.items()))
        for shape in tensors.values():
            left = 2 * math.prod(shape)
            while left:
                left -= file.write(random.tobytes()[:left])
        os.fsync(file.fileno())
    return max(2 * math.prod(shape) for shape in tensors.values())


def measured(*command: str) -> CopyCost:
    """Run a command to its end. Raises RuntimeError if it fails."""
    with tempfile.TemporaryFile("w+") as out:
        begin_s = time.monotonic()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - begin_s
        out.seek(0)
        output = out.read()
    if status:
        raise RuntimeError(f"{command}: {output[-2000:]}")
    return CopyCost(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, output)


def copied(source: Path, target: Path, wanted: int) -> CopyCost:
    """Copy `wanted` bytes of what lies in a folder, all of which is read."""
    cost = measured(sys.executable, "-c", COPY, str(source), str(target), str(wanted))
    target.unlink()
    return cost


def report(what: str, cost: CopyCost, copy: CopyCost, largest: int) -> None:
    bound = largest + BOUND
    print(
        f"{what:8} {cost.wall_s:7.1f} s, {cost.wall_s / copy.wall_s:5.2f} of a copy ({copy.wall_s:.1f} s)   "
        f"cpu {cost.cpu_s:6.1f} s, copy {copy.cpu_s:.1f} s   "
        f"peak {cost.peak_bytes / 1e6:6.0f} MB, bound {bound / 1e6:.0f} MB "
        f"({'within' if cost.peak_bytes < bound else 'OVER'})",
        flush=True,
    )


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else 28
    mpitrain = str(Path(sys.executable).with_name("mpitrain"))
    with tempfile.TemporaryDirectory(dir=where) as there:
        model, run, out, scratch = (Path(there) / name for name in ("model", "run", "out", "scratch"))
        largest = make(model, layers)
        parameters = sum(map(math.prod, shapes(layers).values()))
        read = size_of(model)
        print(f"{parameters:,} parameters, {read:,} bytes in bf16, largest tensor {largest:,}", flush=True)
        copy = copied(model, scratch, 2 * read)
        imported = measured(mpitrain, "import", str(model), "--to", str(run))
        report("import", imported, copy, largest)
        shutil.rmtree(model)
        copy = copied(run / "checkpoints", scratch, read)
        exported = measured(mpitrain, "export", str(run), "--to", str(out), "--no-prove")
        writing = float(re.search(r"([0-9.]+) s to write", exported.output)[1])
        report("export", exported, copy, largest)
        report("  writes", exported._replace(wall_s=writing), copy, largest)
        print(exported.output)


if __name__ == "__main__":
    main()

"""What import and export cost: peak memory and time, of a model of 1.5 G parameters on one rank.

    python benchmarks/weights.py [FOLDER] [LAYERS] [DTYPE]    FOLDER: where 15 GB are free; LAYERS: 28

It makes a Hugging Face folder of the sizes of Qwen2.5-1.5B (random numbers, DTYPE: BF16, or F32, which an
export to bf16 rounds), imports it, and exports the run. Before and after each, a process of its own copies
as many bytes: reads what the command reads, writes as much as it writes, in pieces of 8 MB, and syncs once a
file. The page cache is as full for one as for the other.

    memory   the most that was resident in the process, less the bound: the largest tensor + 300 MB
    time     of the command, over the mean of the two copies
    cpu      seconds of processor time, which other programs on the machine change less
"""

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.weights.bits import DTYPES
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


class CommandCost(NamedTuple):
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


def make(folder: Path, layers: int, code: str) -> int:
    """Write the model; return the bytes of the largest tensor."""
    folder.mkdir()
    tensors = shapes(layers)
    (folder / "config.json").write_text(json.dumps({**FIXED, **SIZES, "num_hidden_layers": layers}))
    width = DTYPES[code].itemsize
    # numbers below 1 in absolute value
    bits = np.random.default_rng(0).integers(0x3C00_0000, 0x3E00_0000, PIECE // 4, dtype=np.uint32)
    random = bits.tobytes() if width == 4 else (bits >> 16).astype(np.uint16).tobytes()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(header_of((name, code, shape) for name, shape in tensors.items()))
        for shape in tensors.values():
            left = width * math.prod(shape)
            while left:
                left -= file.write(random[:left])
        os.fsync(file.fileno())
    return max(width * math.prod(shape) for shape in tensors.values())


def measured(*command: str) -> CommandCost:
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
    return CommandCost(wall_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, output)


def copied(source: Path, target: Path, wanted: int) -> CommandCost:
    """Copy `wanted` bytes of what lies in a folder, all of which is read."""
    cost = measured(sys.executable, "-c", COPY, str(source), str(target), str(wanted))
    target.unlink()
    return cost


def report(what: str, cost: CommandCost, copies: Sequence[CommandCost], largest: int) -> None:
    bound = largest + BOUND
    copy_s = statistics.mean(copy.wall_s for copy in copies)
    print(
        f"{what:8} {cost.wall_s:7.1f} s, {cost.wall_s / copy_s:5.2f} of a copy "
        f"({', '.join(f'{copy.wall_s:.1f}' for copy in copies)} s)   "
        f"cpu {cost.cpu_s:6.1f} s, copy {copies[0].cpu_s:.1f} s   "
        f"peak {cost.peak_bytes / 1e6:6.0f} MB, bound {bound / 1e6:.0f} MB "
        f"({'within' if cost.peak_bytes < bound else 'OVER'})",
        flush=True,
    )


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else 28
    code = sys.argv[3] if len(sys.argv) > 3 else "BF16"
    mpitrain = str(Path(sys.executable).with_name("mpitrain"))
    with tempfile.TemporaryDirectory(dir=where) as there:
        model, run, out, scratch = (Path(there) / name for name in ("model", "run", "out", "scratch"))
        largest = make(model, layers, code)
        parameters = sum(map(math.prod, shapes(layers).values()))
        print(
            f"{parameters:,} parameters, {size_of(model):,} bytes in {code}, largest tensor {largest:,}",
            flush=True,
        )
        copies = [copied(model, scratch, 4 * parameters)]
        imported = measured(mpitrain, "import", str(model), "--to", str(run))
        copies.append(copied(model, scratch, 4 * parameters))
        report("import", imported, copies, largest)
        shutil.rmtree(model)
        copies = [copied(run / "checkpoints", scratch, 2 * parameters)]
        exported = measured(mpitrain, "export", str(run), "--to", str(out), "--dtype", "bf16", "--no-prove")
        copies.append(copied(run / "checkpoints", scratch, 2 * parameters))
        report("export", exported, copies, largest)
        print(exported.output)


if __name__ == "__main__":
    main()

"""What export and its proof cost, and how numbers are rounded."""

import json
import math
import os
import platform
import subprocess

import numpy as np
import pytest
import torch
from conftest import LONG
from hypothesis import example, given
from hypothesis import strategies as st
from launch import MPITRAIN

from mpitrain.cluster.heap import KEPT, PIECE, VARIABLES
from mpitrain.weights.bits import DTYPES, cast
from mpitrain.weights.header import header_of

TENSORS = {
    "model.embed_tokens.weight": (16_000, 512),
    "model.norm.weight": (512,),
    **{
        f"model.layers.{n}.{name}.weight": shape
        for n in range(4)
        for name, shape in {
            "input_layernorm": (512,),
            "post_attention_layernorm": (512,),
            **{f"self_attn.{each}_proj": (512, 512) for each in "qkvo"},
            "mlp.gate_proj": (2048, 512),
            "mlp.up_proj": (2048, 512),
            "mlp.down_proj": (512, 2048),
        }.items()
    },
}
FIELDS = dict(
    model_type="llama", hidden_size=512, num_attention_heads=8, num_hidden_layers=4, intermediate_size=2048,
    vocab_size=16_000, rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=True,
    max_position_embeddings=64,
)  # fmt: skip


def faults(*words, **variables):
    """Run a command to its end; return its page faults."""
    mine = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "GLIBC_TUNABLES")}
    process = subprocess.Popen([MPITRAIN, *map(str, words)], env=mine | variables, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_minflt


@LONG
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_an_export_takes_its_memory_from_the_system_once(tmp_path):
    """Bands of a megabyte, each cast, compared and digested, in pages that are there already."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(FIELDS))
    with open(model / "model.safetensors", "wb") as file:
        file.write(header_of((name, "BF16", shape) for name, shape in TENSORS.items()))
        for shape in TENSORS.values():
            file.write(bytes(2 * math.prod(shape)))
    faults("import", model, "--to", tmp_path / "run")
    export = ("export", tmp_path / "run", "--no-prove", "--to")
    by_hand = dict(MALLOC_MMAP_THRESHOLD_=str(PIECE), MALLOC_TRIM_THRESHOLD_=str(KEPT))
    least = faults(*export, tmp_path / "one", **by_hand)
    assert faults(*export, tmp_path / "two") < 1.5 * least, "every band has its pages cleared anew"


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
@example([0x3F808000, 0x3F818000, 0xBF808000, 0x7F7F7FFF, 0x00000001, 0x80018000])  # halfway, largest, tiny
def test_numbers_are_rounded_as_torch_rounds_them(bits):
    exact = np.array(bits, np.uint32).view(np.float32)
    exact = exact[np.isfinite(exact)]
    for code, kind in (("BF16", torch.bfloat16), ("F16", torch.float16)):
        expected = torch.from_numpy(exact.copy()).to(kind).view(torch.int16).numpy()
        assert (cast(exact, DTYPES[code]).view(np.int16) == expected).all()

"""What export and its proof cost, and how rounded numbers are compared in few passes: as by the long way."""

import json
import math
import os
import platform
import subprocess

import numpy as np
import pytest
from conftest import LONG
from hypothesis import given
from hypothesis import strategies as st
from launch import MPITRAIN

from mpitrain.checkpoint.dtypes import BF16
from mpitrain.cluster.heap import KEPT, PIECE, VARIABLES
from mpitrain.weights.bits import cast, difference_from_bf16, widened
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


ROUNDED = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)


@given(ROUNDED)
def test_a_rounded_number_is_known_as_cast_makes_it(bits):
    exact = np.array(bits, np.uint32).view(np.float32)
    exact = exact[np.isfinite(exact)]
    rounded = widened(cast(exact, BF16))
    if not exact.size or not np.isfinite(rounded).all():
        return
    expected = float(np.abs(rounded.astype(np.float64) - exact.astype(np.float64)).max())
    found = difference_from_bf16(exact, rounded)
    assert found is not None and np.isclose(found, expected, rtol=1e-6, atol=0)


@given(st.integers(0, 0x7F7E), st.integers(0, 0xFFFF), st.sampled_from([-1, 1]), st.booleans())
def test_a_neighbour_of_a_rounded_number_is_none(high, low, step, negative):
    """Of all numbers, halfway ones with the other parity among them; also one that is no bf16."""
    exact = np.array([(high + 1 << 16 | low) | negative << 31], np.uint32).view(np.float32)
    rounded = widened(cast(exact, BF16))
    for wrong in (step << 16, step):
        other = (rounded.view(np.int32) + wrong).view(np.float32)
        assert difference_from_bf16(exact, other) is None or (other == exact).all()


@pytest.mark.parametrize("bits", [0x3F808000, 0x3F818000])
def test_halfway_the_even_one_is_right(bits):
    exact = np.array([bits], np.uint32).view(np.float32)
    down, up = ((np.array([(bits & 0xFFFF0000) + more], np.uint32)).view(np.float32) for more in (0, 0x10000))
    right, wrong = (down, up) if not (bits >> 16) & 1 else (up, down)
    assert difference_from_bf16(exact, right) == abs(float(right[0]) - float(exact[0]))
    assert difference_from_bf16(exact, wrong) is None

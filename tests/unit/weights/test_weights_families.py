"""Folders of each family, whose weights lie as those of transformers: read to the bit, and written again.

tests/oracles/transformers_models.py says where they lie; tests/golden/logits.npz shows that it is right.
"""

import json
import re

import numpy as np
import pytest
import safetensors.torch
import torch
from conftest import LONG
from launch import MPITRAIN, finished
from transformers_models import MODELS, plan, their_weights, weights

from mpitrain import config as settings
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.settings.resolve import resolve
from mpitrain.weights.beginning import source_of
from mpitrain.weights.keys import config_json

EXPERT = {"mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}
EXPERTS = ("mlp", ("gate_proj", "up_proj", "down_proj"))
KEPT = ("gpt-oss",)  # whose experts lie together, on disk, too


def as_files_have_them(name):
    """Return the tensors of a file: one of each expert, as save_pretrained() divides them."""
    found = their_weights(name)
    if name in KEPT:
        return found
    part, kinds = EXPERT.get(name, EXPERTS)
    for fused in [key for key in found if key.endswith("mlp.experts.gate_up_proj")]:
        start = fused.removesuffix("mlp.experts.gate_up_proj")
        for expert, (both, down) in enumerate(
            zip(found.pop(fused), found.pop(f"{start}mlp.experts.down_proj"))
        ):
            of_expert = dict(zip(kinds, (*both.chunk(2), down)))
            found |= {f"{start}{part}.experts.{expert}.{kind}.weight": x for kind, x in of_expert.items()}
    return {re.sub(r"mlp\.gate\b", f"{part}.gate", key): x for key, x in found.items()}


def write(path, config, tensors):
    """Write a folder of a resolved configuration's model."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config_json(config, "F32", {}, {})))
    whole = {name: x.contiguous() for name, x in tensors.items()}
    safetensors.torch.save_file(whole, path / "model.safetensors", {"format": "pt"})


def require_read(path, whole, expected):
    """Require that a folder's weights are the expected ones, to the bit."""
    source = source_of(str(path), whole)
    for name, x in expected.items():
        box = source.box(name)
        if box is None:
            assert name.endswith("router.load"), f"{name} isn't read"
            continue
        found = np.full(x.shape, np.nan, np.float32)
        source.read(name, box, found)
        assert np.array_equal(found, x.numpy()), name
    source.close()


def of_gpt2(ours):
    """Return GPT-2's tensors: products as Conv1D, inputs first; queries, keys, values side by side."""
    found = {"transformer.wte.weight": ours["embedding.weight"]}
    found["transformer.wpe.weight"] = ours["embedding.positions"]
    found |= {f"transformer.ln_f.{kind}": ours[f"head.norm.{kind}"] for kind in ("weight", "bias")}
    for block in range(2):
        p, start = f"blocks.{block}.", f"transformer.h.{block}."
        for kind in ("weight", "bias"):
            both = torch.cat([ours[f"{p}attention.{each}.{kind}"] for each in "qkv"])
            parts = {"attn.c_attn": both, "attn.c_proj": ours[f"{p}attention.output.{kind}"]}
            parts |= {"mlp.c_fc": ours[f"{p}ffn.up.{kind}"], "mlp.c_proj": ours[f"{p}ffn.down.{kind}"]}
            found |= {f"{start}{name}.{kind}": x.T if x.ndim > 1 else x for name, x in parts.items()}
            found[f"{start}ln_1.{kind}"] = ours[f"{p}attention.norm.{kind}"]
            found[f"{start}ln_2.{kind}"] = ours[f"{p}ffn.norm.{kind}"]
    return found


def test_gpt2_is_read_as_it_lies(tmp_path):
    sizes = dict(family="gpt2", layers=2, width=8, heads=2, ffn=24, vocab=40, positions=12, tied=True)
    tree = {"model": sizes, "data": {"sequence": 12}, "batch": {"global": 1}}
    whole = plan_of(resolve(settings.parse(tree), 1, 40))
    random = torch.Generator().manual_seed(2)
    ours = {spec.name: torch.randn(spec.shape, generator=random) for spec in whole.parameters()}
    write(tmp_path / "model", whole.config, of_gpt2(ours))
    require_read(tmp_path / "model", whole, ours)


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_read_as_they_lie(name, tmp_path):
    write(tmp_path / "model", plan(name).config, as_files_have_them(name))
    require_read(tmp_path / "model", plan(name), weights(name))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "deepseek-v3" else LONG) for name in MODELS]
)
def test_what_was_imported_is_exported_as_it_lay(name, tmp_path):
    tensors = as_files_have_them(name)
    write(tmp_path / "model", plan(name).config, tensors)
    for words in (("import", "model", "--to", "run"), ("export", "run", "--to", "out")):
        done = finished([MPITRAIN, *words], cwd=tmp_path, timeout=60, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    found = safetensors.torch.load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[key], x) for key, x in tensors.items())

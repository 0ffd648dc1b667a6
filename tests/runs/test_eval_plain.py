"""`mpitrain eval` of a run on bytes equals a plain loop over its weights; needs no transformers.

Against exports, with tasks and in all layouts: test_eval.py.
"""

import json
import math

import pytest
from launch import MPITRAIN, mpirun, run_tiny, tail, write_text
from oracle_decoders import loss_of_documents

from mpitrain.checkpoint.load import open_step
from mpitrain.checkpoint.tensors import to_tensor
from mpitrain.commands.evaluation.evaluated_config import at_length, usable_context
from mpitrain.config import load

HAS = dict(blocks=4, eps=1e-5, head_width=16, theta=10_000.0)
TEXTS = ["a first text", "and another one, which is longer: 0123456789"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval")
    settings = dict(run_steps=2, run_eval_every=0, precision_compute="fp64", model_family="llama")
    done = run_tiny(1, folder / "run", write_text(folder / "text.txt", 20_000), **settings)
    assert done.returncode == 0, tail(done.output)
    return folder / "run"


def weights_of(run_dir):
    with open_step(run_dir / "checkpoints", 2) as saved:
        names = [name for name in saved.names() if name.startswith("parameters/")]
        return {name.partition("/")[2]: to_tensor(saved.read(name)).double() for name in names}


def test_the_loss_of_texts_is_that_of_a_plain_loop(run_dir, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    documents = [([0, *text.encode()], [True] * (len(text) + 1)) for text in TEXTS]  # byte 0 goes before
    wanted = loss_of_documents(weights_of(run_dir), documents, HAS).item()
    for num_ranks, layout in ((1, ()), (2, ("--set", "parallel.pp=2"))):
        out = tmp_path / f"{num_ranks}.json"
        words = ("--data", str(texts), "--out", str(out), "--context", "64", "--step", "best", *layout)
        done = mpirun(num_ranks, MPITRAIN, "eval", str(run_dir), *words)
        assert done.returncode == 0, tail(done.output)
        (result,) = json.loads(out.read_text())["data"].values()
        assert result["loss"] == pytest.approx(wanted, rel=1e-9)
        assert result["perplexity"] == pytest.approx(math.exp(wanted), rel=1e-9)


def test_the_context_of_fp8_is_one_that_its_products_take():
    config = load(None, ("precision.compute=fp8",))
    context = usable_context(config, 100)
    assert at_length(config, context, context).data.sequence == context == 96

"""The last proof of an export: the same logits by transformers, in a child process, and by mpitrain."""

import importlib.util
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from mpitrain import config as settings
from mpitrain.comm.base.interpreter import python
from mpitrain.comm.base.launchers import without_rank
from mpitrain.config import Config, Precision
from mpitrain.errors import LibraryError
from mpitrain.plan.plan import Plan
from mpitrain.weights.folder import ModelFolder
from mpitrain.weights.keys import plan_on_one_rank, without_training
from mpitrain.weights.matching import Matched
from mpitrain.weights.proof import ExportError
from mpitrain.weights.weight_source import FolderSource

SEQUENCES = 2
LENGTH = 24  # tokens of each
LIMIT_S = 3600.0
# of the largest logit: fp32 against fp32, of two programs; transformers' norms are fp32 in fp64, too
TOLERANCE = 1e-4
MOST_ALONE = 300_000_000  # parameters of a model that is compared without being asked for
# that tokenizers cut differently: numbers, contractions, spaces, characters without a token
TEXTS = ["It's 2026: don't  add 13 + 29\n\n\tx", "naïve 日本 🙂"]
CHILD = """
import json, pathlib, sys, warnings
import numpy as np, tokenizers, torch, transformers
folder, given, out = sys.argv[1:]
tokens = torch.tensor(json.load(open(given))["tokens"])
dtype = getattr(torch, json.load(open(given))["dtype"])
torch.set_num_threads(1)
model, info = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=dtype, attn_implementation="eager", output_loading_info=True, trust_remote_code=False,
    local_files_only=True, **json.load(open(given))["more"],
)
kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
empty = {name for name, x in model.named_parameters() if not x.numel()}  # of shared experts, where none are
wrong = {name: sorted(str(each) for each in info[name] if each not in empty) for name in kinds}
with torch.no_grad():
    logits = model.eval()(tokens).logits
file = pathlib.Path(folder, "tokenizer.json")
tokenizer = ""
if file.exists():
    own = tokenizers.Tokenizer.from_file(str(file))
    try:
        kind, plain = transformers.AutoTokenizer, dict(add_special_tokens=False)
        theirs = kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        for text in json.load(open(given))["texts"]:
            if theirs(text, **plain)["input_ids"] != own.encode(text, **plain).ids:
                tokenizer = "makes other tokens of " + ascii(text)
    except Exception as error:
        tokenizer = "can't read it (" + str(error).partition(chr(10))[0][:200] + ")"
np.savez(out, logits=logits.double().numpy(), wrong=json.dumps(wrong), version=transformers.__version__,
    tokenizer=tokenizer)
"""


class SameLogits(NamedTuple):
    """Logits of transformers and ours. tokenizer: what AutoTokenizer does otherwise, or nothing."""

    version: str
    largest: float  # difference
    most: float  # the largest logit
    tokens: int
    tokenizer: str


def is_installed() -> bool:
    """Return whether transformers can be imported, without importing it."""
    return importlib.util.find_spec("transformers") is not None


def require_installed() -> None:
    """Raise LibraryError unless transformers can be imported."""
    if not is_installed():
        install = "install it (pip install transformers), or leave it out"
        raise LibraryError(f"--prove: transformers isn't installed; {install}")


def compare(folder: ModelFolder, matched: Matched, plan: Plan, code: str) -> SameLogits:
    """Compare the logits of a few sequences. Raises ExportError unless they agree."""
    config = plan.config
    length = min(LENGTH, config.data.sequence)
    vocab = matched.weights[0].rows
    numbers = np.random.default_rng(0).integers(0, vocab, (SEQUENCES, length))
    bits = 64 if code == "F64" else 32
    theirs = _theirs(folder.path, numbers, f"float{bits}", config)
    version, wrong = str(theirs["version"]), json.loads(str(theirs["wrong"]))
    if faults := {name: names for name, names in wrong.items() if names}:
        raise ExportError(f"transformers {version} doesn't find the same weights: {json.dumps(faults)[:500]}")
    ours = _ours(folder, matched, config, numbers, f"fp{bits}")
    expected = theirs["logits"][..., : ours.shape[-1]]
    most = float(np.abs(expected).max())
    largest = float(np.abs(ours[..., : expected.shape[-1]] - expected).max())
    if not largest <= TOLERANCE * max(1.0, most):
        what = f"transformers {version} computes other logits from what was written"
        raise ExportError(f"{what}: they differ by {largest:.3g}, and the largest is {most:.3g}")
    return SameLogits(version, largest, most, numbers.size, str(theirs["tokenizer"]))


def _theirs(path: Path, tokens: np.ndarray, dtype: str, config: Config) -> dict[str, np.ndarray]:
    more = {"experts_implementation": "eager"} if config.experts.count else {}
    environment = without_rank(os.environ) | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as there:
        given = Path(there) / "given.json"
        asked = {"tokens": tokens.tolist(), "texts": TEXTS, "dtype": dtype, "more": more}
        given.write_text(json.dumps(asked))
        out = Path(there) / "logits.npz"
        command = python("-c", CHILD, str(path), str(given), str(out))
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            took = f"transformers took more than {LIMIT_S:.0f} s"
            raise ExportError(f"{took} to load what was written") from None
        if done.returncode or not out.exists():
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise ExportError(f"transformers doesn't load what was written: {last[:300]}")
        with np.load(out) as file:
            return dict(file)


def _ours(
    folder: ModelFolder, matched: Matched, config: Config, tokens: np.ndarray, compute: str
) -> np.ndarray:
    import torch  # an export without this proof needs none

    from mpitrain.actor.stage import Stage
    from mpitrain.model.build_context import BuildContext
    from mpitrain.parallel.microbatch import Microbatch
    from mpitrain.parallel.walk import run

    keys = {"data.sequence": tokens.shape[1], "data.documents": "joined", "run.compile": False}
    keys["model.init"] = "-"  # no random weights are made
    changed = settings.with_values(without_training(config, len(tokens)), keys)
    plan = plan_on_one_rank(msgspec.structs.replace(changed, precision=Precision(compute=compute)))
    stage = Stage(plan.stages[0], BuildContext(plan, torch.device("cpu"), training=False))
    source = FolderSource(folder, matched, plan.config)
    for spec, data in stage.state.weights():
        box = source.box(spec.name)
        if box is not None:
            source.read(spec.name, box, data.numpy()[tuple(slice(0, n) for n in box.shape)])
    with torch.no_grad():
        return run(stage.forward(0, None, Microbatch(torch.from_numpy(tokens)))).double().numpy()

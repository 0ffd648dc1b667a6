"""Sample text from a checkpoint, on one rank and without MPI."""

from collections.abc import Iterator

import mpi4py
import torch

mpi4py.rc.initialize = False  # one process, perhaps on a login node where MPI_Init fails

from mpitrain.checkpoint import load  # noqa: E402
from mpitrain.cluster.rundir import RunDir, read_config  # noqa: E402
from mpitrain.data.documents import documents_of  # noqa: E402
from mpitrain.data.tokenizer import load_tokenizer, separator  # noqa: E402
from mpitrain.device import set_threads  # noqa: E402
from mpitrain.errors import CheckpointError, DataError  # noqa: E402
from mpitrain.model.recipe import run  # noqa: E402
from mpitrain.resolve import on_one_rank  # noqa: E402
from mpitrain.stage import Microbatch, Stage  # noqa: E402


def sample(run_dir: str, prompt: str, num_tokens: int, temperature: float, seed: int) -> Iterator[str]:
    """Yield the prompt and then text as it is sampled; the context is the last data.sequence tokens.

    A model of separate documents stops at the end of one.
    """
    stage, tokenizer = _load(run_dir)
    ends = separator(stage.config.data, tokenizer)
    ids = tokenizer.encode(prompt.encode()).astype("int64").tolist()
    if not ids:
        raise DataError("--prompt gives no token; needed at least one to go on from")
    generator = torch.Generator().manual_seed(seed)
    shown = ""
    with torch.no_grad():
        for _ in range(num_tokens + 1):
            text = tokenizer.decode(ids)
            whole = text.rstrip("\ufffd")  # a character of several tokens is shown when it is complete
            if whole.startswith(shown):
                yield whole[len(shown) :]
                shown = whole
            ids.append(_next(stage, ids[-stage.config.data.sequence :], ends, temperature, generator))
            if ids[-1] == ends:  # how another document begins was never learnt
                return


def _next(stage: Stage, ids: list[int], ends: int | None, temperature: float, generator: torch.Generator) -> int:
    tokens_BT = torch.tensor([ids])
    documents_BT = None if ends is None else documents_of(tokens_BT, ends)
    run(stage.forward(0, None, Microbatch(tokens_BT, documents=documents_BT)))
    logits_V = stage.losses[0][0, -1]  # without targets, what the last stage keeps are the logits
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(torch.softmax(logits_V / temperature, 0), 1, generator=generator))


def _load(run_dir: str):
    """Return the whole model as one stage, with the weights of the newest checkpoint, and the tokenizer."""
    rundir = RunDir(run_dir)
    if not rundir.config.exists():
        raise CheckpointError(f"{run_dir}: no config.toml; give the run directory of `mpitrain run`")
    config = read_config(rundir.config)
    config = on_one_rank(config)
    saved = load.open_latest(rundir.checkpoints)
    if saved is None:
        raise CheckpointError(f"{rundir.checkpoints}: no checkpoint yet; wait for the first one (run.save_every) and try again")
    set_threads(config.run)
    stage = Stage(config, 0, torch.device("cpu"))
    with saved:
        for spec, data in stage.weights():
            data.copy_(torch.from_numpy(saved.read(f"parameters/{spec.name}")))
    return stage, load_tokenizer(config.data.tokenizer)

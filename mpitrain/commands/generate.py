"""Sample text from a checkpoint, on one rank and without MPI. The run directory may be a stranger's
(docs/guides/security.md).
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from mpitrain.actor.stage import Stage, assemble
from mpitrain.checkpoint import load
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.cluster.rundir import RunDir, read_config
from mpitrain.commands.decoding import NextToken, require_cache_memory, why_not_cached
from mpitrain.config import Batch, Config, Data, Memory, Numerics, OptimizerTable
from mpitrain.config_hints import recognised
from mpitrain.data.tokenizer import Tokenizer, load_tokenizer, separator
from mpitrain.data.tokens import DESCRIPTION, describe
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.inputs import kind_of, obeyed, shown
from mpitrain.model.build_context import BuildContext
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.node_memory import require_memory
from mpitrain.plan.settings.resolve import on_one_rank, resolve
from mpitrain.training.machine.device_placement import set_threads


def sample(
    run_dir: str,
    prompt: str,
    num_tokens: int,
    temperature: float,
    seed: int,
    tokenizer_file: str | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Iterator[str]:
    """Yield the prompt and then text as it is sampled; the context is the last data.sequence tokens.

    A model of separate documents stops at the end of one.
    tokenizer_file: instead of what the run directory names.
    top_k, top_p: as `choose` has them.
    """
    if not 0 < top_p <= 1:
        raise DataError(f"--top-p {top_p}: needed a number above 0, and 1 at most; 1 leaves all tokens")
    if not math.isfinite(temperature):
        raise DataError(f"--temperature {temperature}: needed a finite number; 0 takes the likeliest token")
    rundir = RunDir(run_dir)
    config = _read_config(rundir)
    tokenizer = _tokenizer(rundir, config.data, tokenizer_file)
    _warn_of_another(rundir, tokenizer)
    ends, begin = _special_tokens(rundir, config, tokenizer)
    ids = [*begin, *_encode(tokenizer, prompt)]
    config = _for_sampling(rundir, config, tokenizer, len(ids) + num_tokens)
    plan = plan_of(config)
    why = why_not_cached(plan)
    _say_what_is_not_cached(why, config.data.sequence, len(ids) + num_tokens - 1)
    if why is None:
        require_cache_memory(plan)
    stage = _load(rundir, plan)
    generator = torch.Generator().manual_seed(seed)
    shown = ""
    next_token = NextToken(stage, config.data.sequence, ends, cached=why is None)
    with torch.no_grad():
        for number in range(num_tokens + 1):
            text = tokenizer.decode(ids[len(begin) :])
            # a character of several tokens is shown when it is complete
            whole = text.rstrip("\ufffd")
            if whole.startswith(shown):
                yield whole[len(shown) :]
                shown = whole
            if number == num_tokens:
                return
            # a model may have more rows, never learnt
            logits_V = next_token.logits(ids)[: tokenizer.vocab]
            ids.append(choose(logits_V, temperature, generator, top_k, top_p))
            if ids[-1] == ends:  # how another document begins was never learnt
                return


def choose(
    logits_V: torch.Tensor,
    temperature: float,
    generator: torch.Generator,
    top_k: int = 0,
    top_p: float = 1.0,
) -> int:
    """Return a token drawn from softmax(logits / temperature), at 0 the likeliest.

    top_k: of so many tokens, the likeliest, and of more that are as likely as the last; 0: of all.
    top_p: of the fewest tokens that have this probability together (arXiv:1904.09751, section 3.1).

    Raises CheckpointError if there are no likelihoods.
    """
    if not all(map(math.isfinite, logits_V.aminmax())):  # NaN is both
        raise CheckpointError(
            "the weights give NaN or infinite logits; train the model again, or go back to an earlier "
            "checkpoint"
        )
    if temperature == 0:
        return int(logits_V.argmax())
    # at most 0: divided by however little, it is no NaN
    above_V = logits_V.double() - logits_V.max().double()
    probabilities_V = torch.softmax(above_V / temperature, 0)
    if 0 < top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        probabilities_V = probabilities_V.masked_fill(logits_V < least, 0)
        probabilities_V /= probabilities_V.sum()
    if top_p < 1:
        probabilities_V = _nucleus(probabilities_V, top_p)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def _nucleus(probabilities_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the same with 0 for all but the fewest tokens that have `top_p` together, the likeliest."""
    sorted_V, tokens_V = probabilities_V.sort(descending=True, stable=True)
    before_V = sorted_V.cumsum(0) - sorted_V
    kept_V = sorted_V.masked_fill(before_V >= top_p, 0)
    return torch.zeros_like(probabilities_V).scatter_(0, tokens_V, kept_V)


def visible(text: str) -> str:
    """Return text for a terminal, without what it would obey: a model can be taught to say that.

    Ordinary spaces and joiners stay.
    """
    return "".join("\ufffd" if obeyed(c) else c for c in text)


def _read_config(rundir: RunDir) -> Config:
    try:
        kind = kind_of(rundir.config)
    except OSError as error:
        raise CheckpointError(
            f"{rundir.path}: {error.strerror}; give the run directory of `mpitrain run`"
        ) from error
    if kind is None:
        found = recognised(rundir.path, own=False)
        what = f"it is {found}" if found else "no config.toml"
        raise CheckpointError(f"{rundir.path}: {what}; give the run directory of `mpitrain run`")
    return read_config(rundir.config)


def _tokenizer(rundir: RunDir, data: Data, given: str | None) -> Tokenizer:
    """Return the tokenizer that is given, or else the run's own, which must not be a file elsewhere.

    Of all that its reader may read.
    """
    name = data.tokenizer
    end = data.end_of_text
    begin = data.begin_of_text
    if given is not None:
        return load_tokenizer(given, end, begin)
    if name == "bytes":
        return load_tokenizer(name, end, begin)
    try:
        file = Path(os.path.realpath(name))
        inside = file.is_relative_to(os.path.realpath(rundir.path))
        kind = kind_of(file)
    except (OSError, ValueError):  # too long; a zero byte
        inside, kind = False, None
    if inside and kind == "a file":
        return load_tokenizer(file, end, begin)
    with suppress(OSError):
        if kind_of(rundir.data) == "a folder" and kind_of(rundir.tokenizer) == "a file":
            return load_tokenizer(rundir.tokenizer, end, begin)
    found = (kind or "missing") if inside else "outside of the run directory, and not read for it"
    named = f"{rundir.config} names the tokenizer {shown(repr(name))}"
    raise DataError(
        f"{named}, which is {found}; give --tokenizer FILE, the one that the run was trained with"
    )


def _special_tokens(
    rundir: RunDir,
    config: Config,
    tokenizer: Tokenizer,
) -> tuple[int | None, list[int]]:
    """Return the token that ends a document, if they are separate, and what one begins with.

    As the run's tokens have them.
    """
    ends = tokenizer.end_of_text
    begin = tokenizer.begin_of_text
    separate = config.data.documents == "separate"
    with suppress(DataError, OSError):
        origin = describe(rundir.data).origin
        older = origin.form == 1
        ends, begin = (
            (tokenizer.older_end_of_text, None) if older else (origin.end_of_text, origin.begin_of_text)
        )
    if separate and ends is None:
        separator(config.data, tokenizer)
    known = begin is not None and begin < tokenizer.vocab
    return ends if separate else None, [begin] if known else []


def _warn_of_another(rundir: RunDir, tokenizer: Tokenizer) -> None:
    """Say so if the run's tokens are another tokenizer's.

    No more: one written with other spaces gives the same.
    """
    with suppress(DataError, OSError):
        if describe(rundir.data).origin.tokenizer != tokenizer.identity:
            print(
                f"warning: {rundir.data / DESCRIPTION}: the run had another tokenizer, or another edition of "
                "its file",
                file=sys.stderr,
            )


def _say_what_is_not_cached(why: str | None, sequence: int, length: int) -> None:
    """Say in one line which tokens take a pass over the text. length: of the text, at most."""
    if why is not None:
        print(f"no key-value cache, every token takes a pass over the text: {why}", file=sys.stderr)
    elif length > sequence:
        print(
            f"no key-value cache beyond {sequence} tokens (data.sequence): from there on every token takes a "
            "pass over the last so many",
            file=sys.stderr,
        )


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    try:
        text = prompt.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"--prompt is not UTF-8 text (character {error.start}); needed text") from error
    ids = tokenizer.encode(text).astype("int64").tolist()
    if not ids:
        raise DataError("--prompt gives no token; needed at least one to go on from")
    return ids


def _for_sampling(rundir: RunDir, config: Config, tokenizer: Tokenizer, num_tokens: int) -> Config:
    """Return the configuration of the whole model for at most `num_tokens` tokens.

    Raises ConfigError before anything is allocated.
    """
    one = on_one_rank(config)
    threads = min(one.run.threads, os.cpu_count() or 1)
    one = msgspec.structs.replace(
        one,
        run=msgspec.structs.replace(one.run, threads=threads, device="cpu"),
        batch=Batch(global_=16, micro=16),
        memory=Memory(),
        numerics=Numerics(),
        optimizer=OptimizerTable(name="sgd", momentum=0.0),
    )
    try:
        one = resolve(one, 1, tokenizer.vocab, needed=tokenizer.needed)
        require_memory(plan_of(one))
    except ConfigError as error:
        raise ConfigError(f"{rundir.config}: {shown(error.args[0])}") from error
    return msgspec.structs.replace(
        one, data=msgspec.structs.replace(one.data, sequence=min(one.data.sequence, num_tokens))
    )


def _load(rundir: RunDir, plan: Plan) -> Stage:
    """Return the whole model as one stage, with the weights of the newest checkpoint."""
    passed_over: list[str] = []
    saved = load.open_latest(rundir.checkpoints, warn=passed_over.append, needs=plan.stored_weights())
    if saved is None:
        raise CheckpointError(
            f"{rundir.checkpoints}: no checkpoint yet; wait for the first one (run.save_every) and try again"
        )
    for text in passed_over:
        print(f"warning: {text}", file=sys.stderr)
    with saved:
        set_threads(plan.config.run)
        (whole,) = plan.stages
        stage = assemble(whole, BuildContext(plan, torch.device("cpu")))
        _fill(stage, saved)
    return stage


def _fill(stage: Stage, saved: Checkpoint) -> None:
    for spec, data in stage.state.weights():
        data.copy_(torch.from_numpy(saved.read(f"parameters/{spec.name}")))
        if not torch.isfinite(data).all():
            raise CheckpointError(
                f"{saved.path}: parameters/{spec.name} holds NaN or infinite numbers; train the model again, "
                "or remove this step to use the one before"
            )

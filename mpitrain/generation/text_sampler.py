"""Sample text from a checkpoint, perhaps a stranger's (docs/guides/security.md), without MPI."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mpitrain import config as settings
from mpitrain.actor.stage import Stage
from mpitrain.checkpoint import load
from mpitrain.checkpoint.tensors import to_tensor
from mpitrain.cluster.entry import warn
from mpitrain.cluster.rundir import RunDir, read_config, require_run
from mpitrain.comm.base.cores import cores_of_process
from mpitrain.config import Config
from mpitrain.data.chat_template import (
    WITHOUT_CHAT,
    ids_of_ends,
    messages_of,
    read_chat_template,
    read_template_folder,
)
from mpitrain.data.tokenizer import Tokenizer, separator
from mpitrain.data.tokens import DESCRIPTION
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.generation.decoding import NextToken, length_in_memory, why_not_cached
from mpitrain.generation.sampling import SamplingRules, ShownText
from mpitrain.inputs import read_regular, shown
from mpitrain.model.build_context import BuildContext
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.node_memory import require_memory
from mpitrain.plan.settings.resolve import on_one_rank, resolve
from mpitrain.training.machine.device_placement import set_threads
from mpitrain.training.step_documents import tokenizer_of_run
from mpitrain.weights.companions import document_tokens, ends_of_run, length_of_run, origin_of_tokens
from mpitrain.weights.keys import without_training


@dataclass(frozen=True)
class SamplingRequest:
    """What is sampled after each prompt."""

    num_tokens: int
    seed: int
    rules: SamplingRules = field(default_factory=SamplingRules)
    tokenizer_file: str | None = None  # instead of what the run directory names
    stops: tuple[str, ...] = ()  # the text ends before the first of these
    chat: bool = False  # a prompt is a question, and text the answer, by the chat template
    system: str | None = None  # what the template is given before the question


class TextSampler:
    """The model of a run directory, for some prompts.

    The context is the model's own length, or what memory has room for. The text stops at the end of
    a document, or at one of the ends that came along with the weights; an answer (chat) at its end.
    """

    def __init__(self, run_dir: str, prompts: Sequence[str], request: SamplingRequest):
        rundir = RunDir(run_dir)
        require_run(rundir)
        config = read_config(rundir.config)
        self.request = request
        self.tokenizer = tokenizer_of_run(rundir, config.data, request.tokenizer_file)
        _warn_of_another(rundir, self.tokenizer)
        begin, end = document_tokens(rundir, self.tokenizer)
        self._begin = [] if begin is None or begin >= self.tokenizer.vocab else [begin]
        separate = config.data.documents == "separate"
        if separate and end is None:
            separator(config.data, self.tokenizer)
        self._ends = end if separate else None
        self._stops = ends_of_run(rundir, end)
        if request.chat:
            ends, self._ids = _questions(rundir, self.tokenizer, prompts, request)
            self._stops |= ends
        else:
            self._ids = [[*self._begin, *_encode(self.tokenizer, prompt)] for prompt in prompts]
        length = max(map(len, self._ids)) + request.num_tokens
        plan = plan_of(_for_sampling(rundir, config, self.tokenizer, length))
        why = why_not_cached(plan)
        self._cached = why is None
        self._sequence = length_in_memory(plan) if self._cached else plan.config.data.sequence
        of_memory = self._sequence < plan.config.data.sequence
        _say_what_is_not_cached(why, self._sequence, length - 1, of_memory)
        self._stage = _load(rundir, plan)

    def text(self, number: int) -> Iterator[str]:
        """Yield a prompt, by its number, and text as it is sampled; of a chat the answer alone."""
        request = self.request
        generator = torch.Generator().manual_seed(request.seed)
        ids = list(self._ids[number])
        hidden = len(ids if request.chat else self._begin)
        next_token = NextToken(self._stage, self._sequence, self._ends, self._cached)
        shown = ShownText(self.tokenizer.decode(ids[hidden:]), request.stops)
        yield self._shown(shown, ids[hidden:])
        with torch.no_grad():
            for left in range(request.num_tokens, 0, -1):
                # a model may have more rows, never learnt
                logits_V = next_token.logits(ids)[: self.tokenizer.vocab]
                ids.append(request.rules.choose(logits_V, generator, ids))
                ended = ids[-1] in self._stops
                if ended:
                    del ids[-1]
                yield self._shown(shown, ids[hidden:], last=ended or left == 1)
                if ended or shown.stopped:
                    return

    def _shown(self, shown: ShownText, ids: list[int], last: bool = False) -> str:
        text = self.tokenizer.decode(ids)
        return shown.grow(text, _settled(self.tokenizer, ids, text), last)


def _settled(tokenizer: Tokenizer, ids: list[int], text: str) -> int:
    """Return how many characters of the text of some tokens no further token changes.

    With byte fallback, bytes that follow one another are decoded together: each is U+FFFD unless
    all are UTF-8. A byte that begins no character changes the line feed before it.
    """
    if tokenizer.stray_byte is not None:
        changed = tokenizer.decode([*ids, tokenizer.stray_byte])
        differing = (n for n, pair in enumerate(zip(text, changed)) if pair[0] != pair[1])
        text = text[: next(differing, None)]
    return len(text.rstrip("\ufffd"))


def sample(run_dir: str, prompt: str, request: SamplingRequest) -> Iterator[str]:
    """Yield a prompt and then text as it is sampled."""
    yield from TextSampler(run_dir, [prompt], request).text(0)


def _warn_of_another(rundir: RunDir, tokenizer: Tokenizer) -> None:
    """Say so if the run's tokens are another tokenizer's, which may be alike but for its spaces."""
    origin = origin_of_tokens(rundir)
    if origin is not None and origin.tokenizer != tokenizer.identity:
        what = "the run had another tokenizer, or another edition of its file"
        warn(f"warning: {rundir.data / DESCRIPTION}: {what}")


def _say_what_is_not_cached(why: str | None, sequence: int, length: int, of_memory: bool) -> None:
    """Say which tokens take a pass over the text. length: its own. of_memory: more don't fit in."""
    if why is not None:
        warn(f"no key-value cache, every token takes a pass over the text: {why}")
    elif length > sequence:
        whose = "for which this machine has memory" if of_memory else "the model's own length"
        how = "from there on every token takes a pass over the last so many"
        warn(f"no key-value cache beyond {sequence} tokens, {whose}: {how}")


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    try:
        text = prompt.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"--prompt is not UTF-8 text (character {error.start}); needed text") from error
    ids = tokenizer.encode(text).astype("int64").tolist()
    if not ids:
        raise DataError("--prompt gives no token; needed at least one to continue")
    return ids


def _questions(
    rundir: RunDir, tokenizer: Tokenizer, prompts: Sequence[str], request: SamplingRequest
) -> tuple[frozenset[int], list[list[int]]]:
    """Return tokens that end an answer, and prompts' by the chat template. Raises DataError."""
    if tokenizer.identity == "bytes":
        raise DataError("--chat: a tokenizer of bytes has no chat template; leave --chat out")
    if request.tokenizer_file is not None:
        template = read_template_folder(Path(request.tokenizer_file).parent, WITHOUT_CHAT)
    else:
        own = rundir.came_along
        template = read_chat_template(lambda name, most: read_regular(own / name, most, 2), shown(own))
    ends = ids_of_ends(template, tokenizer.special)
    texts = template.texts([messages_of(prompt, request.system) for prompt in prompts])
    ids = [tokenizer.encode_with_special(text) for text in texts]
    if not all(ids):
        raise DataError("--chat: the chat template gives no token for a prompt; leave --chat out")
    return ends, ids


def _for_sampling(rundir: RunDir, config: Config, tokenizer: Tokenizer, num_tokens: int) -> Config:
    """Return the configuration of the whole model for `num_tokens` tokens. Raises ConfigError."""
    one = on_one_rank(config)
    threads = min(one.run.threads, len(cores_of_process()))
    one = settings.with_values(without_training(one, 16), {"run.threads": threads})
    try:
        one = resolve(one, 1, tokenizer.vocab, needed=tokenizer.needed)
        require_memory(plan_of(one), training=False)
    except ConfigError as error:
        raise ConfigError(f"{rundir.config}: {shown(error.args[0])}") from error
    length = max(one.data.sequence, one.model.positions or 0, length_of_run(rundir))
    return settings.with_values(one, {"data.sequence": min(length, num_tokens)})


def _load(rundir: RunDir, plan: Plan) -> Stage:
    passed_over: list[str] = []
    saved = load.open_latest(rundir.checkpoints, warn=passed_over.append, needs=plan.stored_weights())
    if saved is None:
        change = "wait for the first one (run.save_every) and try again"
        raise CheckpointError(f"{rundir.checkpoints}: no checkpoint yet; {change}")
    for text in passed_over:
        warn(f"warning: {text}")
    with saved:
        set_threads(plan.config.run)
        (whole,) = plan.stages
        stage = Stage(whole, BuildContext(plan, torch.device("cpu"), training=False))
        for spec, data in stage.state.weights():
            data.copy_(to_tensor(saved.read(f"parameters/{spec.name}")))
            if not torch.isfinite(data).all():
                what = f"{saved.path}: parameters/{spec.name} holds NaN or infinite numbers"
                change = "train the model again, or remove this step to use the one before"
                raise CheckpointError(f"{what}; {change}")
    return stage

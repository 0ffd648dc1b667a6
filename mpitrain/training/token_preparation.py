"""`mpitrain data prepare`: what a run does before its first step with the text, on all ranks, and no more.

data.tokens        the tokens go to their folder in it, for all runs of this text and tokenizer
else run.dir/data  where the run of this configuration finds them
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mpitrain.cluster.guard import Guard
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.lock import Lock
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.status_board import BUSY
from mpitrain.comm.base.world import World
from mpitrain.config import Config
from mpitrain.data.corpus import corpus_of
from mpitrain.data.permutation import FEISTEL
from mpitrain.data.preparation import Reporter, prepare, prepare_store
from mpitrain.data.tokenizer import vocabulary_of
from mpitrain.data.tokens import describe, keep_tokenizer, num_prepared
from mpitrain.errors import DataError, StoppedEarly, counted
from mpitrain.inputs import shown
from mpitrain.plan.settings.resolve import require_vocabulary
from mpitrain.training.agreement import attempt, loaded, require_same_configuration, still_working
from mpitrain.training.corpora import PreparedCorpus
from mpitrain.training.prepare import begun_from_init, tokenizer_or_copy
from mpitrain.training.tokenizing import OneTokenizer


def prepare_tokens(
    path: str | None, overrides: tuple[str, ...], guard: Guard, say: Callable[[str], object]
) -> int:
    """Prepare the tokens of a configuration; return the exit code. Collective over all ranks.

    Raises alike on all ranks InputError, and StoppedEarly, which keeps what is prepared.
    """
    read = attempt(path, overrides)
    world = guard.connect()
    guard.place.enter("start", "checking the configuration", BUSY)
    asked = world.on_every_rank("checking the configuration", lambda: loaded(read))
    require_same_configuration(world, asked.config)
    guard.place.name(guard.place.who, Limit(asked.config.comm.timeout_s).seconds)
    begun = world.on_every_rank("reading model.init", lambda: begun_from_init(asked))[1]
    tokenizer = OneTokenizer(world, begun.config.data)
    with guard.place.at("start", "reading the tokenizer", BUSY):
        vocabulary = tokenizer.read(lambda: tokenizer_or_copy(begun.config))
    check = partial(require_vocabulary, begun.config.model, vocabulary.vocab, vocabulary.needed)
    world.on_every_rank("checking the vocabulary", check)
    preparation = _Preparation(begun.config, world, guard, tokenizer, say)
    with guard.place.at("tokens", "preparing the tokens", BUSY):
        world.on_first_rank("preparing the tokens", preparation.run, tokenizer.help)
    return 0


@dataclass
class _Preparation:
    _config: Config
    _world: World
    _guard: Guard
    _tokenizer: OneTokenizer
    _say: Callable[[str], object]

    def __post_init__(self) -> None:
        self._still = partial(still_working, world=self._world, guard=self._guard)
        reporter = Reporter(self._still, self._say)
        self._tools = dict(report=reporter, encoder_of=self._tokenizer.encoder)

    def run(self) -> None:
        """Prepare the tokens, and say what they are."""
        folder = self._in_store() if self._config.data.tokens else self._in_run_dir()
        vocabulary = vocabulary_of(self._tokenizer.whole)
        with suppress(DataError):  # too short for data.sequence, which a run may change
            prepared = PreparedCorpus(self._config, folder, vocabulary, FEISTEL, self._still)
            with suppress(DataError):
                prepared.find()
            prepared.keep()
        found = describe(folder)
        self._say(f"text: {found.tally.describe(found.count)}")
        width = counted(np.dtype(found.dtype).itemsize, "bytes")
        self._say(f"prepared: {shown(folder)} has {found.count:,} tokens of {width} each")

    def _in_store(self) -> Path:
        """Return the folder of data.tokens that has the tokens now."""
        data, tokenizer = self._config.data, self._tokenizer.whole
        return prepare_store(corpus_of(data), tokenizer, data.tokens, **self._tools, locked=self._locked)

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        with Lock(folder, self._guard.end).held(self._still, self._say):
            try:
                yield
            except StoppedEarly as early:
                raise self._kept(early, folder) from early

    def _in_run_dir(self) -> Path:
        """Return the folder of the run directory that has the tokens now."""
        rundir = RunDir(self._config.run.dir)
        rundir.take(self._guard.end, self._still)
        try:
            rundir.require_same_run(self._config)
            tokenizer = self._tokenizer.whole
            prepare(corpus_of(self._config.data), tokenizer, rundir.data, **self._tools)
            keep_tokenizer(rundir.data, tokenizer)
        except StoppedEarly as early:
            raise self._kept(early, rundir.data) from early
        finally:
            rundir.undo(keep_data=True)
        return rundir.data

    def _kept(self, early: StoppedEarly, folder: Path) -> StoppedEarly:
        count = num_prepared(folder)
        return StoppedEarly(early.where, early.why, f"{count:,} tokens are prepared and kept")

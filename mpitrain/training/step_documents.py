"""Which documents a step of a run has read, and where in them, from its run directory alone."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.cluster.rundir import RunDir, lines_of, number_in, read_config, require_run
from mpitrain.comm.base.grid import Grid
from mpitrain.config import Config, Data
from mpitrain.data.batch_sizes import BatchSizes
from mpitrain.data.corpus import corpus_of
from mpitrain.data.corpus_files import named
from mpitrain.data.mixture import batch_slots, places_after_skips
from mpitrain.data.permutation import FEISTEL, MOST_WINDOWS, SORTED
from mpitrain.data.tokenizer import Tokenizer, load_tokenizer
from mpitrain.data.tokens import describe, open_ends, open_tokens
from mpitrain.errors import CheckpointError, ConfigError, DataError
from mpitrain.inputs import kind_of, shown
from mpitrain.plan.division.batch_division import sequences_of
from mpitrain.plan.division.sequence import SequencePlacement, placement_of_rows
from mpitrain.training.corpora import PreparedCorpus


class DocumentPart(NamedTuple):
    """Tokens of a document that a sequence has.

    document: its number among those of its source, from 0; None: the run's tokens are of an older
    version, which doesn't note documents.
    offset: tokens of it before these.
    """

    source: str
    document: int | None
    offset: int
    tokens: list[int]
    text: str


class SequenceRead(NamedTuple):
    """A sequence of a step, with its place in the order of the data.

    reads, num_bytes: how many pieces of tokens.bin it is made of, and their bytes.
    positions: those that the rank computes, as it holds them (context parallelism); None: all.
    """

    place: int
    parts: list[DocumentPart]
    reads: int
    num_bytes: int
    positions: np.ndarray | None


class StepDocuments:
    """The sequences that a step has read, of all ranks or one. slots: of all ranks, in order."""

    def __init__(self, run_dir: str, step: int, rank: int | None = None):
        self.rundir = RunDir(run_dir)
        require_run(self.rundir)
        self.config = read_config(self.rundir.config)
        self.tokenizer = tokenizer_of_run(self.rundir, self.config.data, None)
        batch = BatchSizes(self.config.batch).at(step)
        first = self._first_place(step, batch)
        self._cp_rank = 0
        self._placement: SequencePlacement | None = None
        self.slots = range(first, first + batch)
        self._rows = slice(0, batch)  # of the batch
        if rank is not None:
            at = _coordinates(self.config, rank)
            mine = sequences_of(self.config, at["dp"], batch)
            self._rows = slice(mine.start, mine.stop)
            self._cp_rank = at["cp"]
            length = BatchSizes(self.config.batch).length_at(step) or self.config.data.sequence
            self._placement = placement_of_rows(self.config, length)
        self._ends = np.asarray(open_ends(self.rundir.data))
        self._tokens = open_tokens(self.rundir.data)
        self._sources = _Sources(self.config, self.rundir.data)

    @property
    def num_sequences(self) -> int:
        return self._rows.stop - self._rows.start

    def sequences(self) -> Iterator[SequenceRead]:
        """Yield the sequences in the order of the step's rows."""
        newest = order_of_run(self.rundir, self.config)
        prepared = PreparedCorpus(self.config, self.rundir.data, self.tokenizer, newest)
        prepared.find()
        train = prepared.corpora().train
        for slot in batch_slots(train, self.slots.start, len(self.slots))[self._rows]:
            pieces = train.pieces(slot)
            place = int(places_after_skips([slot], self.config.data.skip)[0])
            num_bytes = sum(end - begin for begin, end in pieces) * self._tokens.dtype.itemsize
            parts = [part for piece in pieces for part in self._parts(*piece)]
            positions = self._positions(train.rows([slot]).ends)
            yield SequenceRead(place, parts, len(pieces), num_bytes, positions)

    def _positions(self, ends: np.ndarray | None) -> np.ndarray | None:
        """Return the positions of a sequence that the rank computes. ends: if documents are separate."""
        placement = self._placement
        if placement is None:
            return None
        held = placement.positions(self._cp_rank)
        begins = range(0, self.config.data.sequence, placement.sequence)
        if ends is None or not placement.divides_documents:
            return np.concatenate([begin + held for begin in begins])
        of_rows = (ends[0, begin : begin + placement.sequence].astype(np.int64) for begin in begins)
        orders = (placement.order(row.cumsum() - row) for row in of_rows)
        return np.concatenate([begin + order[held] for begin, order in zip(begins, orders, strict=True)])

    def _first_place(self, step: int, batch: int) -> int:
        """Return the place in the order at which a step begins. Raises ConfigError for one not done."""
        last = 0
        sequence = self.config.data.sequence
        with suppress(FileNotFoundError):
            for line, known in lines_of(self.rundir.metrics):
                last = max(last, known or 0)
                if known == step:
                    read = number_in(line, "read")
                    first = step * batch - batch if read is None else read // sequence - batch
                    if not 0 <= first < MOST_WINDOWS:
                        where = shown(self.rundir.metrics)
                        raise DataError(f"{where}: by step {step} {read} tokens were read: it is damaged")
                    return first
        done = f"has done steps 1 to {last}; give one of these" if last else "has done no step yet"
        raise ConfigError(f"--step {step}: {shown(self.rundir.path)} {done}")

    def _parts(self, begin: int, end: int) -> Iterator[DocumentPart]:
        """Yield the parts of documents that lie between two tokens of tokens.bin."""
        while begin < end:
            number = int(np.searchsorted(self._ends, begin, side="right"))
            known = number < len(self._ends)
            last = min(end, int(self._ends[number])) if known else end
            tokens = self._tokens[begin:last].tolist()
            source, first = self._sources.of(number)
            first_token = int(self._ends[number - 1]) if known and number else 0
            document = number - first if known else None
            yield DocumentPart(source, document, begin - first_token, tokens, self.tokenizer.decode(tokens))
            begin = last


class _Sources:
    """The sources of a run's documents, by their numbers in its tokens."""

    def __init__(self, config: Config, folder: Path):
        data = config.data
        tally = describe(folder).tally
        self._names = [named(part.path) or part.source for part in corpus_of(data).parts]
        self._firsts = np.concatenate([[0], np.cumsum(tally.parts[:-1])]).astype(np.int64)
        if tally.training is not None:
            self._names.append(named(data.val_path))
            self._firsts = np.append(self._firsts, tally.training)

    def of(self, document: int) -> tuple[str, int]:
        """Return the source of a document, and the number of its first one."""
        place = int(np.searchsorted(self._firsts, document, side="right")) - 1
        return self._names[place], int(self._firsts[place])


def _coordinates(config: Config, rank: int) -> dict[str, int]:
    """Return the coordinates of a rank. Raises ConfigError for one that the layout hasn't."""
    parallel = config.parallel
    grid = Grid({name: getattr(parallel, name) for name in ("tp", "cp", "dp", "pp")})
    if rank >= grid.size:
        raise ConfigError(f"--rank {rank}: the run's layout is {grid}; give 0 to {grid.size - 1}")
    return grid.coordinates(rank)


def order_of_run(rundir: RunDir, config: Config) -> str:
    """Return the name of the order in which a run has its data, as its newest checkpoint notes it."""
    if config.data.order:
        return config.data.order
    from mpitrain.checkpoint.folders import find
    from mpitrain.checkpoint.load import open_step

    for step in sorted(find(rundir.checkpoints), reverse=True):
        with suppress(CheckpointError), open_step(rundir.checkpoints, step) as saved:
            return str(saved.meta.get("order") or (SORTED if step else FEISTEL))
    return FEISTEL


def tokenizer_of_run(rundir: RunDir, data: Data, given: str | None) -> Tokenizer:
    """Return the tokenizer that is given, or the run's own, which must not be a file elsewhere."""
    name, end, begin = data.tokenizer, data.end_of_text, data.begin_of_text
    if given is not None:
        return load_tokenizer(given, end, begin)
    if name in ("bytes", ""):
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
    fault = (kind or "missing") if inside else "outside of the run directory, and not read for it"
    named = f"{rundir.config} names the tokenizer {shown(repr(name))}"
    change = "give --tokenizer FILE, the one that the run was trained with"
    raise DataError(f"{named}, which is {fault}; {change}")

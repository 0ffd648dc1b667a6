"""The prepared tokens of a run as its steps read them: split, mixed, in their order."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import xxhash

from mpitrain.config import Config, DataSource
from mpitrain.data.batch_sizes import BatchSizes
from mpitrain.data.copies import copies_of
from mpitrain.data.corpus_files import named
from mpitrain.data.mixture import (
    HeldOutMixture,
    MixtureSampler,
    Samplers,
    SkippingSampler,
    first_weights,
    mixture_of,
    places_after_skips,
)
from mpitrain.data.order import Sampler
from mpitrain.data.origin import ReadCounts
from mpitrain.data.packed_rows import BLOCK, PackCounts, PackedSampler, SourceSampler
from mpitrain.data.read_tokens import Tokens
from mpitrain.data.source import SOURCES
from mpitrain.data.split import Split, apart, split, tail, within, without
from mpitrain.data.token_rows import Text
from mpitrain.data.tokenizer import Tokenizer, Vocabulary
from mpitrain.data.tokens import Description, describe, note_intact, open_ends, open_tokens, open_unscored
from mpitrain.data.verified import COPIES, PACKED, keep_numbers, kept_numbers
from mpitrain.errors import DataError


@dataclass(frozen=True)
class Corpora:
    """The tokens of a run, in an order that is a pure function of seed and slot.

    order: name of the permutation, which a checkpoint notes.
    separate: rows say where documents end.
    validation: of a mixture, held-out sequences of its sources by their weights.
    validation_of_sources: what is held out of each of data.sources, by its name (run.eval_sources).
    validation_description: how it was chosen.
    by_documents: whether held-out data was chosen by documents; older runs hold the tail of all
    tokens out.
    """

    train: Samplers
    validation: SourceSampler | HeldOutMixture
    validation_of_sources: Mapping[str, SourceSampler]
    digest: str
    order: str
    separate: bool
    validation_description: str
    by_documents: bool


@dataclass
class PreparedCorpus:
    """The tokens in a run directory, by a configuration.

    _order: name of the permutation.
    _each: called before each block that is planned, which takes long where there are many.
    copies: documents that are left out of training.
    packs: of blocks of packed documents, by text; None: not looked for.
    """

    _config: Config
    _folder: Path
    _vocabulary: Vocabulary | Tokenizer
    _order: str
    _each: Callable[[str], object] = lambda what: None
    packs: dict[int, PackCounts] | None = None
    _num_kept: int = 0  # of packs
    _found: tuple[str, np.ndarray] | None = None

    def __post_init__(self) -> None:
        self.copies = np.empty(0, np.int64)

    def corpora(self) -> Corpora:
        """Open what the run trains on and validates with."""
        read = self._config.data.read
        ends, unscored = open_ends(self._folder, read), open_unscored(self._folder, read)
        return self.corpora_of(open_tokens(self._folder, read), ends, describe(self._folder), unscored)

    def find_copies(self) -> np.ndarray:
        """Return the documents that are copies of held-out ones; none for older runs."""
        corpus = describe(self._folder)
        if not corpus.copies_apart:
            return self.copies
        data, seed = self._config.data, self._config.run.seed
        num_between = 0 if self._vocabulary.end_of_text is None else 1
        split_by = data.val_fraction, data.sequence, seed, corpus.tally.training, num_between
        split_by += tuple(self._uncut(corpus))
        key = f"{corpus.content} {split_by}"
        kept = kept_numbers(self._folder, COPIES, key, corpus.tally.documents)
        if kept is not None:
            return kept
        ends = open_ends(self._folder, self._config.data.read)
        held_out = self._split(ends, corpus).validation
        tokens = open_tokens(self._folder, self._config.data.read)
        found = copies_of(tokens, np.asarray(ends), held_out, num_between)
        self._found = key, found
        return found

    def find(self) -> tuple[np.ndarray, dict[int, PackCounts]]:
        """Find copies, and plan the blocks of packed documents, unless an earlier start did; return both."""
        self.copies = self.find_copies()
        if self._config.data.documents == "packed":
            self.corpora()  # each packed text is planned
        return self.copies, self._packs()

    def _packs(self) -> dict[int, PackCounts]:
        """Return what is known of packed texts, by an earlier start or by this one."""
        if self.packs is None:
            self.packs = {}
            with suppress(DataError):  # the tokens aren't complete
                corpus = describe(self._folder)
                num_texts = 2 + 2 * len(self._config.data.sources)
                most = num_texts * (len(PackCounts._fields) + 1 + corpus.tally.documents // BLOCK + 1)
                kept = kept_numbers(self._folder, PACKED, self._pack_key(corpus), most)
                self.packs = {} if kept is None else _unpacked(kept)
                self._num_kept = len(self.packs)
        return self.packs

    def _pack_key(self, corpus: Description) -> str:
        return f"{corpus.content} {self._config.data.sequence} {BLOCK}"

    def keep(self) -> None:
        """Note verified files, copies, packs for the next start. On one rank, after all checks."""
        corpus = describe(self._folder)
        note_intact(self._folder, corpus)
        if self._found:
            keep_numbers(self._folder, COPIES, *self._found)
        if self.packs and len(self.packs) > self._num_kept:
            keep_numbers(self._folder, PACKED, self._pack_key(corpus), _in_numbers(self.packs))

    def corpora_of(
        self, tokens: Tokens, ends: np.ndarray, corpus: Description, unscored: np.ndarray | None = None
    ) -> Corpora:
        """Return what the run trains on and validates with, of these tokens."""
        data = self._config.data
        seed = self._config.run.seed
        tally = corpus.tally
        alike = dict(order=self._order, separate=data.separates, by_documents=bool(ends.size))
        made = partial(Corpora, digest=corpus.content, **alike)
        parts = without(self._split(ends, corpus), ends, self.copies, data.sequence)
        converse = [SOURCES.find(kind).converse is not None for kind in data.kinds]
        sampler_of = partial(self._sampler, tokens, ends, unscored)
        if not data.sources:
            train = sampler_of(parts.train, converse[0], seed)
            validation = sampler_of(parts.validation, converse[0], None)
            how = parts.description + self._left_out([train, validation])
            return made(self._skipping(train), validation, {}, validation_description=how)
        places = tokens_of_sources(ends, tally)
        samplers = list[SourceSampler]()
        for source, place, converses in zip(data.sources, places, converse, strict=True):
            try:
                samplers.append(sampler_of(within(parts.train, *place), converses, seed))
            except DataError as error:
                raise DataError(f'data.sources, path = "{named(source.path)}": {error.args[0]}') from None
        batch = BatchSizes(self._config.batch)
        mixture = mixture_of(data, batch, [sampler.num_sequences for sampler in samplers])
        last = batch.before(self._config.run.steps + 1) - 1
        mixture.require(int(places_after_skips([last], data.skip)[0]) + 1)
        of_sources = dict[int, SourceSampler]()
        for number, (place, converses) in enumerate(zip(places, converse, strict=True)):
            with suppress(DataError):  # too little is held out of this source
                held_out = sampler_of(within(parts.validation, *place), converses, None)
                of_sources |= {number: held_out} if held_out.num_sequences else {}
        weights = first_weights(data, batch)
        weighted = {number: sampler for number, sampler in of_sources.items() if weights[number]}
        validation: SourceSampler | HeldOutMixture
        if weighted:
            validation = HeldOutMixture([*weighted.values()], [weights[number] for number in weighted])
        else:  # no source has a sequence of its own held out
            validation = sampler_of(parts.validation, all(converse), None)
        how = parts.description + self._left_out([*samplers, *of_sources.values()])
        train = self._skipping(MixtureSampler(samplers, mixture))
        by_name = _named(data.sources, of_sources) if self._config.run.eval_sources else {}
        return made(train, validation, by_name, validation_description=how)

    def _sampler(
        self,
        tokens: Tokens,
        ends: np.ndarray,
        unscored: np.ndarray | None,
        stretches: np.ndarray,
        whole: bool,
        seed: int | None,
    ) -> SourceSampler:
        """Return the sequences of stretches of the tokens. whole: conversations are. seed: None: in order."""
        data = self._config.data
        known = None
        if data.separates:
            known = ends if ends.size else self._vocabulary.older_end_of_text
        text = Text(tokens, stretches, known, unscored)
        if data.documents != "packed":
            return Sampler(text, data.sequence, seed, self._order)
        which = xxhash.xxh3_64(np.ascontiguousarray(stretches), seed=int(whole))
        which.update(str(seed).encode())
        key = which.intdigest() >> 1
        counts = self._packs().get(key)
        sampler = PackedSampler(text, data.sequence, seed, self._order, whole, counts, self._each)
        self._packs()[key] = sampler.counts
        return sampler

    def _skipping(self, sampler: SourceSampler | MixtureSampler) -> Samplers:
        skip = self._config.data.skip
        return SkippingSampler(sampler, skip) if skip else sampler

    def _left_out(self, samplers: Sequence[SourceSampler]) -> str:
        """Say how many conversations are longer than a row. Raises DataError for too many of them."""
        data = self._config.data
        packed = [sampler for sampler in samplers if isinstance(sampler, PackedSampler)]
        count = sum(sampler.counts.num_left_out for sampler in packed)
        longest = max((sampler.counts.too_long for sampler in packed), default=0)
        if count > data.damaged or not all(sampler.num_sequences for sampler in samplers):
            raise DataError(
                f"data.sequence = {data.sequence}: {count:,} conversations are longer, up to {longest:,} "
                f"tokens, so that answers don't fit; use data.sequence = {longest - 1}, or data.damaged = "
                f"{count}, which leaves them out"
            )
        return f"; {count:,} conversations longer than a row are left out" * bool(count)

    def _split(self, ends: np.ndarray, corpus: Description) -> Split:
        data, training = self._config.data, corpus.tally.training
        if not ends.size:  # a run begun by an older version keeps its split
            return tail(corpus.count, data.val_fraction, data.sequence)
        if training is not None:
            return apart(ends, training, data.sequence)
        seed = self._config.run.seed
        return split(ends, data.val_fraction, data.sequence, seed, self._uncut(corpus))

    def _uncut(self, corpus: Description) -> list[tuple[int, int]]:
        """Return which documents are conversations that stay whole: the first, and that after the last."""
        tally = corpus.tally
        bounds = np.cumsum([0, *(tally.parts or (tally.documents,))]).tolist()
        parts = zip(pairwise(bounds), self._config.data.kinds, strict=True)
        whole = [part for part, kind in parts if SOURCES.find(kind).converse]
        return whole if corpus.conversations_whole else []


def _in_numbers(packs: Mapping[int, PackCounts]) -> np.ndarray:
    """Return key, number of blocks, three counts and sizes of each, one after the other."""
    parts = [[key, len(found.sizes), *found[1:], *found.sizes.tolist()] for key, found in packs.items()]
    return np.array([number for part in parts for number in part], np.int64)


def _unpacked(numbers: np.ndarray) -> dict[int, PackCounts]:
    """Return what _in_numbers() was given."""
    found = dict[int, PackCounts]()
    while len(numbers):
        key, blocks, *counts = numbers[:5].tolist()
        found[key] = PackCounts(numbers[5 : 5 + blocks], *counts)
        numbers = numbers[5 + blocks :]
    return found


def tokens_of_sources(ends: np.ndarray, tally: ReadCounts) -> list[tuple[int, int]]:
    """Return where the tokens of each of data.sources begin and end."""
    numbers = np.cumsum([0, *tally.parts])
    return list(pairwise(np.where(numbers, np.asarray(ends)[numbers - 1], 0).tolist()))


def _named(sources: Sequence[DataSource], samplers: Mapping[int, SourceSampler]) -> dict[str, SourceSampler]:
    """Return samplers by the last part of their source's path, with a number where another has it."""
    found = dict[str, SourceSampler]()
    for number, sampler in samplers.items():
        path = sources[number].path
        name = Path(path if isinstance(path, str) else path[0]).name or sources[number].source
        found[name if name not in found else f"{name}-{len(found) + 1}"] = sampler
    return found

"""How texts become tokens where a run's weights are judged."""

from dataclasses import dataclass

from mpitrain.cluster.rundir import RunDir
from mpitrain.config import Data
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.weights.companions import document_tokens, ends_of_run, prefix_of_texts


@dataclass(frozen=True)
class EvaluatedVocabulary:
    """A tokenizer, and the special tokens of a run."""

    tokenizer: Tokenizer
    begin: list[int]  # of a text
    prefix: int | None  # the token before a text that has none of its own
    ends: frozenset[int]  # of a text that is generated

    @classmethod
    def of_run(cls, rundir: RunDir, data: Data, tokenizer: Tokenizer, own: bool) -> "EvaluatedVocabulary":
        """Return that of a run. own: the tokenizer is the run's, whose files name special tokens."""
        begin, end = document_tokens(rundir, tokenizer)
        named = prefix_of_texts(rundir, data) if own else None
        prefix = next((token for token in (begin, named, end) if token is not None), None)
        return cls(tokenizer, [] if begin is None else [begin], prefix, ends_of_run(rundir, end))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without the one that begins it."""
        return self.tokenizer.encode(text.encode()).tolist()

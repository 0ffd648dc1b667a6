"""How texts become tokens where a run's weights are judged."""

from mpitrain.cluster.rundir import RunDir
from mpitrain.config import Data
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.weights.companions import document_tokens, ends_of_run, prefix_of_texts


class EvaluatedVocabulary:
    """A tokenizer, and the special tokens of a run. None: there is none.

    begin: begins a text. prefix: before a text that has none of its own. ends: end generated text.
    """

    def __init__(
        self, tokenizer: Tokenizer, begin: int | None, prefix: int | None, ends: frozenset[int] = frozenset()
    ):
        self.tokenizer = tokenizer
        self.prefix = prefix if begin is None else begin
        self.begin = [] if begin is None else [begin]
        self.ends = ends

    @classmethod
    def of_run(cls, rundir: RunDir, data: Data, tokenizer: Tokenizer, own: bool) -> "EvaluatedVocabulary":
        """Return that of a run. own: the tokenizer is the run's, whose files name special tokens."""
        begin, end = document_tokens(rundir, tokenizer)
        named = prefix_of_texts(rundir, data) if own else None
        return cls(tokenizer, begin, end if named is None else named, ends_of_run(rundir, end))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without the one that begins it."""
        return self.tokenizer.encode(text.encode()).tolist()

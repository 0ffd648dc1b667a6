"""Files of documents: loss, perplexity and bits per byte, as lm-evaluation-harness has them.

Sums are over all documents of a file: no mean of documents' means.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpitrain.data.corpus import Corpus, documents
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import DataError
from mpitrain.evaluation.scorer import Questions
from mpitrain.evaluation.windows import ScoreRequest, rolling
from mpitrain.inputs import shown

WORDS = re.compile(r"\s+")  # between words
OVERFLOW = 700.0  # exp of more is no number


class EvaluatedVocabulary:
    """How texts become tokens.

    begin: the token that begins a text, None: there is none.
    prefix: the token before a text that has none of its own; None: there is none.
    """

    def __init__(self, tokenizer: Tokenizer, begin: int | None, prefix: int | None):
        self.tokenizer = tokenizer
        self.prefix = prefix if begin is None else begin
        self.begin = [] if begin is None else [begin]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without the one that begins it."""
        return self.tokenizer.encode(text.encode()).tolist()


@dataclass(frozen=True)
class TextFile:
    """The documents of a file. name: as it was given."""

    name: str
    tokens: list[list[int]]
    num_bytes: int
    num_words: int

    @classmethod
    def read(cls, name: str, text_key: str, vocabulary: EvaluatedVocabulary) -> "TextFile":
        """Read a file of text, JSON lines or a table. Raises DataError."""
        tokens, num_bytes, num_words = [], 0, 0
        for document in documents(Corpus("auto", name, text_key=text_key)):
            if document.ids is not None:
                raise DataError(f"--data {shown(name)}: tokens, not text; give the texts themselves")
            tokens.append(vocabulary.tokenizer.encode(document.text).tolist())
            num_bytes += len(document.text)
            num_words += len(WORDS.split(document.text.decode()))
        return cls(name, tokens, num_bytes, num_words)

    def requests(self, prefix: int | None, context: int, stride: int) -> Iterator[ScoreRequest]:
        """Yield what is scored of each document."""
        for tokens in self.tokens:
            yield from rolling(tokens, prefix, context, stride)

    def ask(self, prefix: int | None, context: int, stride: int) -> Questions:
        """Have all tokens scored; return the file's numbers."""
        requests = list(self.requests(prefix, context, stride))
        scores = yield requests
        total = math.fsum(score.log_likelihood for score in scores)
        count = sum(request.num_scored for request in requests)
        return self._numbers(total, count)

    def _numbers(self, total: float, count: int) -> dict[str, Any]:
        if not count:
            raise DataError(f"--data {shown(self.name)}: no token to score; give a longer text")
        return {
            "documents": len(self.tokens),
            "tokens": count,
            "bytes": self.num_bytes,
            "loss": -total / count,  # nats of a token
            "perplexity": _exp(-total / count),
            "bits_per_byte": -total / self.num_bytes / math.log(2),
            "byte_perplexity": _exp(-total / self.num_bytes),
            "word_perplexity": _exp(-total / self.num_words),
        }


def _exp(x: float) -> float:
    return math.exp(x) if x < OVERFLOW else math.inf

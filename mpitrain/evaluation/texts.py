"""Files of documents: loss, perplexity and bits per byte, as lm-evaluation-harness has them.

Sums are over all documents of a file: no mean of documents' means.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mpitrain.data.corpus import Corpus, documents
from mpitrain.errors import DataError
from mpitrain.evaluation.vocabulary import EvaluatedVocabulary
from mpitrain.evaluation.windows import Questions, rolling
from mpitrain.inputs import shown

WORDS = re.compile(r"\s+")  # between words
FORMATS = "needed text, .jsonl or .parquet"  # an evaluation has no data.source
OVERFLOW = 700.0  # exp of more is no number


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
        for text in _texts_of(name, text_key):
            tokens.append(vocabulary.tokenizer.encode(text).tolist())
            num_bytes += len(text)
            num_words += len(WORDS.split(text.decode()))
        return cls(name, tokens, num_bytes, num_words)

    def ask(self, prefix: int | None, context: int, stride: int) -> Questions:
        """Have all tokens scored; return the file's numbers."""
        requests = [each for tokens in self.tokens for each in rolling(tokens, prefix, context, stride)]
        scores = yield requests
        total = math.fsum(score.log_likelihood for score in scores)
        count = sum(request.num_scored for request in requests)
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


def _texts_of(name: str, text_key: str) -> Iterator[bytes]:
    """Yield the texts of a file. Raises DataError, which names options in place of keys."""
    try:
        for document in documents(Corpus("auto", name, text_key=text_key)):
            if document.ids is not None:
                raise DataError(f"--data {shown(name)}: tokens, not text; give the texts themselves")
            yield document.text
    except DataError as error:
        said = str(error.args[0]).replace("data.path = ", "--data ").replace("data.path", "--data")
        said = said.replace("data.source says the format, if its first bytes don't", FORMATS)
        raise DataError(said.replace("data.text_key", "--text-key")) from None


def _exp(x: float) -> float:
    return math.exp(x) if x < OVERFLOW else math.inf

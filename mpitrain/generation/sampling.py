"""Which token comes next, of its logits; where a text stops. V vocabulary.

In this order, as the transformers library has it: what the text has already, temperature, the most
likely (top-k, top-p, min-p), the draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mpitrain.errors import CheckpointError


@dataclass(frozen=True)
class SamplingRules:
    """How a token is drawn.

    temperature: logits are divided by it; 0: the likeliest token is taken.
    top_k: of so many tokens, the likeliest, and of more that are as likely as the last; 0: of all.
    top_p: of the fewest tokens that have this probability together (arXiv:1904.09751, section 3.1).
    min_p: of tokens that have this share of the likeliest one's probability (arXiv:2407.01082).
    repetition_penalty: logits of tokens that the text has are divided by it, negative ones
    multiplied (arXiv:1909.05858, section 4.1); 1: none.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def choose(self, logits_V: torch.Tensor, generator: torch.Generator, before: Sequence[int] = ()) -> int:
        """Return the next token. before: the text so far. Raises CheckpointError for NaN logits."""
        if not all(map(math.isfinite, logits_V.aminmax())):  # NaN is both
            change = "train the model again, or go back to an earlier checkpoint"
            raise CheckpointError(f"the weights give NaN or infinite logits; {change}")
        if self.repetition_penalty != 1:
            logits_V = _penalised(logits_V, before, self.repetition_penalty)
        if self.temperature == 0:
            return int(logits_V.argmax())
        # at most 0: divided by however little, it is no NaN
        above_V = logits_V.double() - logits_V.max().double()
        probabilities_V = torch.softmax(above_V / self.temperature, 0)
        if 0 < self.top_k < len(logits_V):
            least = logits_V.topk(self.top_k).values[-1]
            probabilities_V = probabilities_V.masked_fill(logits_V < least, 0)
            probabilities_V /= probabilities_V.sum()
        if self.top_p < 1:
            probabilities_V = _nucleus(probabilities_V, self.top_p)
        if self.min_p:
            least = self.min_p * probabilities_V.max()
            probabilities_V = probabilities_V.masked_fill(probabilities_V < least, 0)
        return int(torch.multinomial(probabilities_V, 1, generator=generator))


def _penalised(logits_V: torch.Tensor, before: Sequence[int], penalty: float) -> torch.Tensor:
    """Return logits of which those of the tokens in `before` are lower (penalty above 1)."""
    tokens = torch.tensor(sorted({token for token in before if token < len(logits_V)}), dtype=torch.long)
    logits = logits_V.double()
    said = logits[tokens]
    logits[tokens] = torch.where(said > 0, said / penalty, said * penalty)
    return logits


def _nucleus(probabilities_V: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the same with 0 for all but the fewest tokens that have `top_p` together, the likeliest."""
    sorted_V, tokens_V = probabilities_V.sort(descending=True, stable=True)
    before_V = sorted_V.cumsum(0) - sorted_V
    kept_V = sorted_V.masked_fill(before_V >= top_p, 0)
    return torch.zeros_like(probabilities_V).scatter_(0, tokens_V, kept_V)


class ShownText:
    """A text that grows after a prompt: what of it can be shown, and whether a stop string has come.

    stops: the text ends before the one that is complete first; one in the prompt is none.
    """

    def __init__(self, prompt: str, stops: Sequence[str] = ()):
        self.stops = tuple(filter(None, stops))
        self.stopped = False
        self.shown = ""
        self._begin = len(prompt)

    def grow(self, text: str, settled: int, last: bool = False) -> str:
        """Return what is new of the whole text and can't change, nor be a part of a stop string.

        settled: characters that no later token changes. last: nothing comes after it.
        """
        stops = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop, self._begin)) >= 0]
        if stops:
            self.stopped = True
            text = text[: min(stops)[1]]
        elif not last:
            text = text[:settled]
            text = text[: len(text) - self._begun(text[self._begin :])]
        piece = text[len(self.shown) :]
        self.shown += piece
        return piece

    def _begun(self, text: str) -> int:
        """Return how many characters at the end of a text may be the beginning of a stop string."""
        most = max(map(len, self.stops), default=1) - 1
        lengths = range(min(most, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)

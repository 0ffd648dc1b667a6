"""Tokens as requests to a model: which are its input, and which of them are scored.

As lm-evaluation-harness has it (lm_eval/utils.py, get_rolling_token_windows; models/huggingface.py).
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple


class ScoreRequest(NamedTuple):
    """The last `num_scored` tokens, each given all that stand before it."""

    tokens: Sequence[int]
    num_scored: int


class Score(NamedTuple):
    """Of a request. greedy: all tokens were the likeliest. token: the likeliest for the last."""

    log_likelihood: float
    greedy: bool
    token: int


# asks, and returns a result
Questions = Generator[Sequence[ScoreRequest], list[Score], dict[str, Any]]


def rolling(tokens: Sequence[int], prefix: int | None, context: int, stride: int) -> Iterator[ScoreRequest]:
    """Yield windows that score each token once; without a prefix, all but the first.

    The first window has `context` inputs, the prefix before them. Each later one scores `stride`
    tokens, the last one what is left, with as many before them as the context has room for.
    """
    whole = [*([] if prefix is None else [prefix]), *tokens]
    done = min(context + 1, len(whole))
    if done > 1:
        yield ScoreRequest(whole[:done], done - 1)
    while done < len(whole):
        end = min(done + stride, len(whole))
        yield ScoreRequest(whole[max(0, end - context - 1) : end], end - done)
        done = end

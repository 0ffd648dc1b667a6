"""How the answers of a model are judged, as lm-evaluation-harness does (lm_eval/api/task.py)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import DataError
from mpitrain.evaluation.task_file import DELIMITER, NEW_TOKENS, Example, read_examples, with_shots
from mpitrain.evaluation.vocabulary import EvaluatedVocabulary
from mpitrain.evaluation.windows import Questions, Score, ScoreRequest
from mpitrain.inputs import shown

METRICS = ("acc", "acc_norm", "acc_bytes", "perplexity", "exact_match")  # that a task may have
# what is kept of answers beside the metrics
MOST_SAMPLES, MOST_LETTERS, MOST_CHOICES = 3, 300, 10


@dataclass(frozen=True)
class TaskFile:
    """The examples of a file. where: in messages, with the option or key. before: few-shot examples."""

    where: str
    before: str
    examples: list[Example]
    vocabulary: EvaluatedVocabulary

    @classmethod
    def read(cls, name: str, option: str, shots: int, vocabulary: EvaluatedVocabulary) -> "TaskFile":
        """Read a task file, which an option or key names. Raises DataError."""
        where = f"{option} {shown(name)}"
        before, examples = with_shots(read_examples(name, where), shots, where)
        return cls(where, before, examples, vocabulary)

    def longest(self, context: int) -> int:
        """Return the most inputs of a request, at most `context`."""
        if self.examples[0].kind == "generation":
            lengths = [len(self._text(e)) + (e.tokens or NEW_TOKENS) for e in self.examples]
        else:
            lengths = [len(request.tokens) - 1 for request in self._requests(context)]
        return min(context, max(lengths))

    def ask(self, context: int) -> Questions:
        """Have all examples answered; return the task's numbers, and each answer."""
        if self.examples[0].kind == "generation":
            return (yield from self._generate(context))
        scores = yield self._requests(context)
        if self.examples[0].kind == "cloze":
            return _cloze(self.examples, scores)
        return self._choose(iter(scores))

    def _text(self, example: Example) -> list[int]:
        return [*self.vocabulary.begin, *self.vocabulary.encode(self.before + example.text)]

    def _requests(self, context: int) -> list[ScoreRequest]:
        requests = []
        for number, example in enumerate(self.examples, 1):
            choices = [DELIMITER + choice for choice in example.choices] or [example.target]
            for choice in choices:
                before, after = encoded_pair(self.before + example.text, choice, self.vocabulary)
                if len(after) > context or not after:
                    merged = ", since they merge with the text's last" * (not after)
                    has = f"{shown(repr(choice))} has {len(after)} tokens{merged}"
                    what = f"{has}, needed 1 to {context}, the context"
                    change = "shorten it, or lengthen the context"
                    raise DataError(f"{self.where}, example {number}: {what}; {change}")
                whole = [*before, *after][-(context + 1) :]  # the text's beginning is cut
                requests.append(ScoreRequest(whole, len(after)))
        return requests

    def _choose(self, scores) -> dict[str, Any]:
        """Return the accuracies of multiple choice: ties go to the first."""
        lengths = {"acc": lambda choice: 1, "acc_norm": len, "acc_bytes": lambda choice: len(choice.encode())}
        hits: dict[str, list[bool]] = {name: [] for name in lengths}
        answers: list[dict[str, Any]] = []
        for example in self.examples:
            sums = [next(scores).log_likelihood for _ in example.choices]
            for name, length in lengths.items():
                values = [total / length(choice) for total, choice in zip(sums, example.choices)]
                choice = values.index(max(values)) if not any(map(math.isnan, values)) else -1
                hits[name].append(choice == example.right)
                if name == "acc":
                    answers.append({
                        "prompt": example.text, "choices": example.choices, "target": example.right,
                        "choice": choice, "log_likelihoods": sums,
                    })  # fmt: skip
        numbers: dict[str, float] = {}
        for name, right in hits.items():
            numbers |= _rated(name, right)
        return {"examples": len(answers), **numbers, "answers": answers}

    def _generate(self, context: int) -> Questions:
        """Return the share of exact matches of greedy text, spaces at its ends left out."""
        texts = []
        for example in self.examples:
            room = max(1, context - (example.tokens or NEW_TOKENS))
            texts.append(GreedyText(example, self._text(example)[-room:], self.vocabulary))
        while growing := [text for text in texts if not text.ended]:
            scores = yield [ScoreRequest([*text.ids[-context:], 0], 1) for text in growing]
            for text, score in zip(growing, scores):
                text.add(score.token)
        right = [text.text.strip() in [answer.strip() for answer in text.example.answers] for text in texts]
        answers = [
            {"prompt": text.example.text, "target": text.example.answers, "text": text.text} for text in texts
        ]
        return {"examples": len(texts), **_rated("exact_match", right), "answers": answers}


class GreedyText:
    """The likeliest tokens after a text, until one that ends texts, a stop string or enough of them."""

    def __init__(self, example: Example, ids: list[int], vocabulary: EvaluatedVocabulary):
        self.example = example
        self.ids = ids or [vocabulary.prefix or 0]
        self.ended = False
        self.text = ""
        self._decode = vocabulary.tokenizer.decode
        self._first = len(self.ids)
        self._ends = vocabulary.ends

    def add(self, token: int) -> None:
        """Add a token."""
        if token in self._ends:
            self.ended = True
            return
        self.ids.append(token)
        self.text = self._decode(self.ids)[len(self._decode(self.ids[: self._first])) :]
        places = [place for stop in self.example.stops if (place := self.text.find(stop)) >= 0]
        if places:
            self.text = self.text[: min(places)]
        enough = len(self.ids) - self._first >= (self.example.tokens or NEW_TOKENS)
        self.ended = bool(places) or enough


def encoded_pair(text: str, after: str, vocabulary: EvaluatedVocabulary) -> tuple[list[int], list[int]]:
    """Return the tokens of a text and of what comes after it.

    Spaces at the text's end belong to what comes after: words' tokens begin with one. Both are
    encoded together; where tokens merge over the border, the text's own count cuts them.
    """
    bare = text.rstrip()
    after = text[len(bare) :] + after
    if not bare:
        ids = vocabulary.encode(after)
        if vocabulary.prefix is None or ids[:1] == [vocabulary.prefix]:
            return ids[:1], ids[1:]
        return [vocabulary.prefix], ids
    whole = [*vocabulary.begin, *vocabulary.encode(bare + after)]
    count = len(vocabulary.begin) + len(vocabulary.encode(bare))
    return whole[:count], whole[count:]


def samples(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first answers of a task, shortened, for a reader."""
    first = answers[:MOST_SAMPLES]
    return [{name: _shortened(name, value) for name, value in each.items()} for each in first]


def _shortened(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_shortened("", item) for item in value[:MOST_CHOICES]]
    if isinstance(value, str):
        return value[-MOST_LETTERS:] if name == "prompt" else value[:MOST_LETTERS]
    return value


def _cloze(examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, Any]:
    mean = math.fsum(score.log_likelihood for score in scores) / len(scores)
    numbers = _rated("acc", [score.greedy for score in scores])
    numbers["perplexity"] = math.exp(min(-mean, 700.0))  # of an example
    answers = []
    for example, (log_likelihood, greedy, _) in zip(examples, scores):
        answer = {"greedy": greedy, "log_likelihoods": [log_likelihood]}
        answers.append({"prompt": example.text, "target": example.target, **answer})
    return {"examples": len(scores), **numbers, "answers": answers}


def _rated(name: str, hits: Sequence[bool]) -> dict[str, float]:
    """Return the share of hits, and the standard error of this mean."""
    mean = sum(hits) / len(hits)
    variance = math.fsum((hit - mean) ** 2 for hit in hits) / max(1, len(hits) - 1)
    return {name: mean, f"{name}_stderr": math.sqrt(variance / len(hits))}

"""Texts and tasks scored by plain loops over a transformers model, one sequence at a time, in fp64.

The rules are written anew from lm-evaluation-harness (reference: lm_eval/api/model.py, api/task.py).
"""

import math
import re

import torch


class LoopEvaluation:
    """model: an ExportedModel. tokenizer: of `tokenizers`. prefix: the token before a text without one.

    begin: whether a text begins with it.
    """

    def __init__(self, model, tokenizer, prefix, begin, context):
        self.model, self.tokenizer, self.prefix, self.context = model, tokenizer, prefix, context
        self.begin = [prefix] if begin else []

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def log_probabilities(self, tokens):
        return torch.log_softmax(torch.from_numpy(self.model.logits([tokens])[0]), -1)

    def sum_and_greedy(self, before, after):
        whole = (before + after)[-(self.context + 1) :]
        at = self.log_probabilities(whole[:-1])[-len(after) :]
        total = sum(at[place, token].item() for place, token in enumerate(after))
        return total, at.argmax(-1).tolist() == after

    def text(self, text, stride=None):
        """Return the sum of a document, token after token: each window's inputs end before what it scores."""
        tokens, total, done = self.ids(text), 0.0, 0
        step = self.context
        while done < len(tokens):
            fresh = tokens[done : done + step]
            before = [self.prefix, *tokens[:done]][-(self.context + 1 - len(fresh)) :]
            total += self.sum_and_greedy(before, fresh)[0]
            done += len(fresh)
            step = stride or self.context
        return total, len(tokens)

    def of_file(self, texts, stride=None):
        total, count = map(sum, zip(*(self.text(text, stride) for text in texts)))
        num_bytes = sum(len(text.encode()) for text in texts)
        words = sum(len(re.split(r"\s+", text)) for text in texts)
        return {
            "tokens": count,
            "perplexity": math.exp(-total / count),
            "bits_per_byte": -total / num_bytes / math.log(2),
            "word_perplexity": math.exp(-total / words),
        }

    def pair(self, text, after):
        stripped = text.rstrip()
        after = text[len(stripped) :] + after
        if not stripped:
            return self.sum_and_greedy([self.prefix], self.ids(after))
        whole = self.begin + self.ids(stripped + after)
        border = len(self.begin + self.ids(stripped))
        return self.sum_and_greedy(whole[:border], whole[border:])

    def choice(self, text, choices):
        sums = [self.pair(text, f" {choice}")[0] for choice in choices]
        by_length = [total / len(choice) for total, choice in zip(sums, choices)]
        return sums, sums.index(max(sums)), by_length.index(max(by_length))

    def greedy(self, text, count, stop):
        ids = self.begin + self.ids(text)
        made = []
        for _ in range(count):
            window = (ids + made)[-self.context :]
            made.append(int(self.model.logits([window])[0, -1].argmax()))
            if stop in self.tokenizer.decode(made, skip_special_tokens=False):
                break
        said = self.tokenizer.decode(ids + made, skip_special_tokens=False)
        said = said[len(self.tokenizer.decode(ids, skip_special_tokens=False)) :]
        return said.partition(stop)[0]

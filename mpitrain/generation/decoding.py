"""Logits of the next token of a text: with a key-value cache while the text fits in the context.

    tokens     a b c d e f | g | h | ...       one forward of the prompt, one of each token after it
    beyond     b c d e f g h                   the last tokens that the context has, one forward for each
    the context                                token: all their positions are others than a token before

B texts, T tokens, V vocabulary.
"""

from bisect import bisect_right

import torch

from mpitrain.actor.stage import Stage
from mpitrain.data.documents import documents_of
from mpitrain.errors import ConfigError
from mpitrain.model.kv_cache import KeyValueCache
from mpitrain.parallel.microbatch import Microbatch
from mpitrain.parallel.walk import run
from mpitrain.plan.declared.layer import cache_bytes_of
from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory_limit import limit_of_node


class NextToken:
    """Logits of what comes after a text that grows.

    stage: the whole model, without gradients. sequence: tokens of the context. cached: by a
    key-value cache. ends: the token that ends a document, if attention stays within one.
    """

    def __init__(self, stage: Stage, sequence: int, ends: int | None, cached: bool):
        self.stage = stage
        self.sequence = sequence
        self.ends = ends
        self.cached = cached
        self.cache = KeyValueCache(sequence)

    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return the logits [V] after `ids`: those of the call before, and one token or more."""
        if not self.cached or len(ids) > self.sequence:
            self.cache = KeyValueCache(self.sequence)  # of no use any more
            ids = ids[-self.sequence :]
            return run(self.stage.forward(0, None, self._microbatch(ids, ids)))[0, -1]
        begin = self.cache.length
        for some in [ids] if begin == 0 else [[token] for token in ids[begin:]]:
            logits_B1V = run(self.stage.decode(self._microbatch(some, ids), self.cache))
        return logits_B1V[0, -1]

    def _microbatch(self, some: list[int], ids: list[int]) -> Microbatch:
        """Return some tokens of a text, with the document of each of its positions, [1, T]."""
        documents = None if self.ends is None else documents_of(torch.tensor([ids]), self.ends)
        return Microbatch(torch.tensor([some]), documents=documents)


def why_not_cached(plan: Plan) -> str | None:
    """Return why the tokens of a model can't be computed one by one; None: they can."""
    if plan.config.precision.compute == "fp8":
        return "in fp8 the scale of a product is that of all tokens"
    for layer in _layers(plan):
        if cache_bytes_of(layer, plan.config.data.sequence, 1) is None:
            return f"the layer {type(layer).__name__} has no method cache_bytes"
    return None


def length_in_memory(plan: Plan) -> int:
    """Return how many tokens, up to data.sequence, fit in memory. Raises ConfigError for none."""
    itemsize = itemsizes_of(plan.config)[0]
    layers = _layers(plan)
    weights = sum(spec.numel for spec in plan.parameters()) * itemsize
    limit = limit_of_node(1)

    def num_bytes(length: int) -> int:
        return weights + sum(cache_bytes_of(layer, length, itemsize) or 0 for layer in layers)

    found = bisect_right(range(1, plan.config.data.sequence + 1), limit.usable, key=num_bytes)
    if not found:
        what = f"the weights need {weights / 1e9:.3g} GB, which {limit.source} has no room for"
        raise ConfigError(f"{what}; take a machine with more memory")
    return found


def _layers(plan: Plan) -> list:
    return [placed.layer for stage in plan.stages for block in stage.blocks for placed in block]

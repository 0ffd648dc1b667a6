"""What the blocks of a stage are given of each microbatch: start, history, what is visible."""

import torch

from mpitrain.kernels.document_spans import spans_of
from mpitrain.model.build_context import BuildContext
from mpitrain.model.kv_history import History, mask
from mpitrain.parallel.microbatch import Context, DecodingCache, Microbatch


class Contexts:
    """Of one stage. Microbatch `index` is segment index % segments of one that is cut into segments."""

    def __init__(self, site: BuildContext):
        self._site = site
        self._segments = site.plan.table.segments
        # by microbatch, of which the last segment isn't done
        self.histories: dict[int, History] = {}

    def of(self, index: int, microbatch: Microbatch) -> Context:
        """Make the context of a microbatch for all blocks; segments come in ascending order."""
        documents = microbatch.documents
        site = self._site
        if site.cp is not None or (documents is None and self._segments == 1):
            return Context(microbatch, functions=site.functions)
        sequence = site.plan.config.data.sequence if documents is None else documents.shape[-1]
        length = sequence // self._segments
        segment = index % self._segments
        start = segment * length
        history = self.histories.setdefault(index // self._segments, {}) if self._segments > 1 else None
        visible = spans = None
        if documents is None or site.device.type != "cpu":
            visible = mask(start, start + length, documents, site.dtype, site.device)
        else:
            spans = spans_of(documents, start, start + length)
        return Context(microbatch, start, segment, history, visible, spans, functions=site.functions)

    def decoding(self, microbatch: Microbatch, cache: DecodingCache) -> Context:
        """Make the context of a text's next tokens; its documents are of all positions so far."""
        site = self._site
        start = cache.length
        end = start + microbatch.tokens.shape[1]
        documents = microbatch.documents
        visible = None if documents is None else mask(start, end, documents, site.dtype, site.device)
        return Context(microbatch, start, cache=cache, visible=visible, functions=site.functions)

    def evaluated(self, index: int) -> None:
        """A forward without a backward is done."""
        if (index + 1) % self._segments == 0:
            self.histories.pop(index // self._segments, None)

    def forget(self, index: int) -> None:
        """A backward is done: segments come in descending order."""
        if index % self._segments == 0:
            self.histories.pop(index // self._segments, None)

    def stays(self, context: Context) -> list[torch.Tensor]:
        """Return what a microbatch has once for all blocks."""
        microbatch = context.microbatch
        return [x for x in (context.visible, microbatch.documents, microbatch.order) if x is not None]

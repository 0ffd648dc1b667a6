"""The ends of a model: token numbers to vectors, and the last norm, logits and loss. tp divides the
vocabulary, for any size of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.plan.declared.dropout_sites import EMBEDDING as SITE
from mpitrain.plan.declared.layer import Layer, Sizes, Working
from mpitrain.plan.declared.layer_traffic import into, out
from mpitrain.plan.declared.parameters import EPS, ROWS, NormKind, Spec, matrix, norm
from mpitrain.plan.declared.probabilities import LOGITS, LOGITS_ON_A_DEVICE
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.traffic import LOCAL, Started, Traffic
from mpitrain.plan.declared.work import AttentionCore, PartWork, Product, at_an_end, stream_bytes

if TYPE_CHECKING:
    from mpitrain.model.build_context import BuildContext
    from mpitrain.parallel.walk import Item
    from mpitrain.parallel.zero.parameters import Parameter

EMBEDDING = "embedding.weight"
POSITIONS = "embedding.positions"


@dataclass(frozen=True)
class Embedding(Layer):
    """tied: the head uses the same weights.

    scale: by which the vectors are multiplied, rounded to the type of the weights (Gemma).
    positions: that have a learned vector each, which is added (GPT-2); 0: none.
    dropout: the share that is dropped of their sum.
    """

    vocab: int
    width: int
    tied: bool
    scale: float = 1.0
    positions: int = 0
    dropout: float = 0.0

    def parameters(self) -> tuple[Spec, ...]:
        table = matrix(EMBEDDING, self.vocab, self.width, ROWS, group="table", tied=self.tied)
        if not self.positions:
            return (table,)
        return table, matrix(POSITIONS, self.positions, self.width, None, group="table")

    def flops(self, sequence: int) -> float:
        return 0.0

    def kept(self, sizes: Sizes, segment: int) -> int:
        """Token numbers, and with tp which of them are here."""
        return (9 if sizes.tp > 1 else 8) * sizes.positions

    def left(self, sizes: Sizes) -> int:
        """Rows of the gradient, and which they are; with tp, those of learned positions are others."""
        of_positions = sizes.stream(self.width) if self.positions and sizes.tp > 1 else 0
        if self.positions and sizes.config.data.separates:
            of_positions += 8 * sizes.shared
        return (self.width * sizes.itemsize + 8) * sizes.positions + of_positions

    def working(self, sizes: Sizes) -> Working:
        """The gradient of the rows in the type of their sum, if that is wider."""
        wider = sizes.positions * self.width * 4 if sizes.itemsize == 2 else 0
        more = sizes.gathered(self.width) + (sizes.dropped(self.width) if self.dropout else 0)
        return Working(more, wider + more)

    def traffic(self, sizes: Sizes) -> tuple[Traffic, ...]:
        items = (LOCAL, out(sizes, self.width)) if sizes.tp > 1 else (LOCAL,)
        return *items, *bool(self.positions) * (LOCAL,), *bool(self.dropout) * (LOCAL,)

    def work(self, layout: StepLayout, load: float) -> PartWork:
        """A lookup, and its sum over tp."""
        sent, back = at_an_end("scatter", layout, self.width)
        passes = 4 * stream_bytes(layout, self.width)
        return PartWork((), AttentionCore(), passes, 4, sent, back)

    def items(self, own: Mapping[str, "Parameter"], site: "BuildContext") -> list["Item"]:
        import torch

        from mpitrain.model.embedding_and_head import EmbeddingLookup, LearnedPositions, VocabularyEmbedding
        from mpitrain.model.residual_dropout import dropout_of

        scale = torch.tensor(self.scale, dtype=site.dtype).item()
        added = [LearnedPositions(own[POSITIONS], site)] if self.positions else []
        added += dropout_of(self.dropout, 0, SITE, site)
        if site.tp:
            return [VocabularyEmbedding(own[EMBEDDING], scale), site.out(), *added]
        return [EmbeddingLookup(own[EMBEDDING], scale), *added]


@dataclass(frozen=True)
class Head(Layer):
    """tied: with the weights of the embedding.  eps, kind: of the norm.  soft_cap: of logits, as in
    LogitLimits (model/embedding_and_head.py).
    """

    vocab: int
    width: int
    tied: bool
    eps: float = EPS
    kind: NormKind = NormKind.RMS
    soft_cap: float = 0.0

    @property
    def weight(self) -> str:
        return EMBEDDING if self.tied else "head.weight"

    def parameters(self) -> tuple[Spec, ...]:
        table = matrix(self.weight, self.vocab, self.width, ROWS, group="table", tied=self.tied)
        return *self.norm("head.norm"), table

    def norm(self, name: str) -> tuple[Spec, ...]:
        """Return the parameters of a norm before the logits."""
        return norm(name, self.width, self.eps, self.kind)

    def flops(self, sequence: int) -> float:
        return 6.0 * self.vocab * self.width

    def kept(self, sizes: Sizes, segment: int) -> int:
        """Targets, the input and what is normed of it, logits and the log of their sum for each
        position, which is fp32 at least.
        """
        logits = sizes.positions * self.vocab // sizes.tp * sizes.itemsize
        logits += sizes.positions * sizes.wide
        if sizes.tp == 1:
            return sizes.positions * (8 + self.width * sizes.itemsize + sizes.norm(self.width)) + logits
        return sizes.positions * 10 + sizes.normed_once(self.width, sizes.itemsize) + logits

    def left(self, sizes: Sizes) -> int:
        return (self.width + self.vocab // sizes.tp) * sizes.itemsize * sizes.positions

    def working(self, sizes: Sizes) -> Working:
        """Logits some positions at a time, in fp32 at least; the gradient of logits takes their place."""
        vocab = self.vocab // sizes.tp
        most = LOGITS_ON_A_DEVICE if sizes.on_gpu else LOGITS
        at_once = min(most, sizes.positions * vocab) * sizes.wide
        at_once *= 2 if sizes.itemsize == 2 or sizes.on_gpu else 1
        stream = sizes.stream(self.width) + sizes.gathered(self.width)
        return Working(at_once + stream, 3 * stream)

    def traffic(self, sizes: Sizes) -> tuple[Traffic, ...]:
        """With tp, the loss gathers two numbers of each token, of every rank."""
        if sizes.tp == 1:
            return (LOCAL,)
        norm = () if self.kind is NormKind.NONE else (LOCAL,)
        softmax = Started("all_gather", "tp", 2 * sizes.positions * sizes.tp * sizes.wide)
        return *norm, into(sizes, self.width), Traffic((softmax,))

    def work(self, layout: StepLayout, load: float) -> PartWork:
        """Logits and the loss: two passes over logits of 16 bits, and some of fp32."""
        n, vocab = layout.positions, -(-self.vocab // layout.tp)
        sent, back = at_an_end("gather", layout, self.width)
        product = Product(n, vocab, self.width, narrow=False)
        passes, kept = (n * vocab * size for size in ((8, 6) if layout.fused else (20, 10)))
        return PartWork((product,), AttentionCore(), passes, 12, sent, back, kept=kept)

    def items(
        self, own: Mapping[str, "Parameter"], site: "BuildContext", norm: str = "head.norm"
    ) -> list["Item"]:
        """norm: the name of its norm."""
        from mpitrain.model.embedding_and_head import HeadSegment, LogitLimits, VocabularyHead  # torch
        from mpitrain.model.segment import norm_segment

        limits = LogitLimits(own[self.weight], site.plan.config.model.padding or 0, self.soft_cap)
        if site.tp:
            head = VocabularyHead(limits, site.tp, site.functions)
            return [*norm_segment(own, norm), site.into(), head]
        return [HeadSegment(own[f"{norm}.weight"], own.get(f"{norm}.bias"), limits)]

"""What a microbatch leaves behind in a stage between its forward and its backward: formulas, in bytes. What is held is counted in watch.py.

Numbers kept of a block, with n = B T positions on this rank, width D, H C query and K C key-value features, F hidden units; of a norm's
factor 1 per position, of attention's log-sum-exp H:

    none        attention  2 n D + n + 3 n H C + 2 n K C + n H    unit and normed input | q, k, v, result, result side by side
                ffn        2 n D + n + 4 n F                      the same | gate, silu(gate), up, product
    selective   attention  n D + n + n H C + 2 n K C              input | q, k, v
                ffn        n D + n + 2 n F                        input | gate, up
    full        n D per block; every-k: n D per group
    from I to W attention  2 n D + 2 n H C + 2 n K C              both factors of each weight gradient, in every mode
                ffn        2 n D + 3 n F

With fp8 these factors (normed input, result side by side, product) have one byte a number, the rest two.

tp divides H, K and F; with `sequence`, it divides what stands before the gather (and after the scatter), too. cp divides n. There the
normed input has travelled, or the result will have: it is kept in selective mode, too.
"""

from mpitrain.config import Config
from mpitrain.layout.parameters import itemsizes_of, num_stages, specs_of
from mpitrain.layout.recompute_groups import groups_of, inner_blocks


class Activations:
    """The formulas of one stage of the model, for microbatches whose sequence is cut into `segments`."""

    def __init__(self, config: Config, stage: int, segments: int = 1):
        model, parallel = config.model, config.parallel
        blocks = specs_of(config, stage)
        names = [spec.name for number in inner_blocks(config, stage) for spec in blocks[number]]
        self.config, self.segments, self.tp = config, segments, parallel.tp
        self.attentions = sum(name.endswith("attention.q.weight") for name in names)
        self.ffns = sum(name.endswith("ffn.gate.weight") for name in names)
        self.groups, self.first, self.last = len(groups_of(config, stage)), stage == 0, stage == num_stages(config) - 1
        self.length = config.data.sequence // (parallel.cp * segments)
        self.positions = config.batch.micro * self.length
        self.shared = self.positions // (parallel.tp if parallel.sequence else 1)  # positions of the residual stream on this rank
        self.kv_heads, self.head_width = max(1, model.kv_heads // parallel.tp), model.width // model.heads
        self.itemsize, _ = itemsizes_of(config)
        self.factor = 1 if config.precision.compute == "fp8" else self.itemsize  # bytes of what a block's weight gradients are made of
        self.again = config.memory.recompute == "selective"
        self.offloaded = config.memory.offload in ("activations", "all")

    def kept(self, segment: int = 0) -> int:
        """Return what the forward of a segment leaves on the device.

        On a GPU attention's result is there only once, but with fp8, where its copy side by side is another.
        """
        inner = 0 if self.offloaded else self._inner(segment)
        history = self._keys() if self.segments > 1 else 0  # for later segments
        numbers = ((9 if self.tp > 1 else 8) if self.first else 0) + ((10 if self.tp > 1 else 8) if self.last else 0)  # tokens, targets
        head = self._head() if self.last else 0
        return inner + history + self._mask(segment) * self.itemsize + head + numbers * self.positions

    def on_host(self, segment: int = 0) -> int:
        """Return what it leaves in host memory instead."""
        return self._inner(segment) if self.offloaded else 0

    def left(self) -> int:
        """Return what a backward for inputs (I) leaves for the one for weights (W)."""
        model = self.config.model
        attention = 2 * model.width + 2 * model.width // self.tp + 2 * self.kv_heads * self.head_width
        left = (self.attentions * attention + self.ffns * (2 * model.width + 3 * model.ffn // self.tp)) * self.factor
        if self.last:
            left += (model.width + model.vocab // self.tp) * self.itemsize
        return left * self.positions

    def returned(self, segment: int) -> int:
        """Return the gradients of earlier keys and values that wait when the backward of a segment is done: first as one tensor."""
        return (self.segments if segment == self.segments - 1 else segment) * self._keys()

    def _inner(self, segment: int) -> int:
        """What blocks keep, without embedding and head."""
        if self.config.memory.recompute in ("full", "every-k"):
            return self.groups * self.shared * self.config.model.width * self.itemsize
        earlier = segment * self._keys()  # copied to beside this segment's
        return self.attentions * self._attention() + self.ffns * self._feed_forward() + earlier

    def _keys(self) -> int:
        """Keys and values of one segment in all attentions."""
        return self.attentions * 2 * self.positions * self.kv_heads * self.head_width * self.itemsize

    def _normed(self, itemsize: int) -> int:
        """What a norm and the products behind it keep of their input. itemsize: of a number that the products keep."""
        width, in_pieces = self.config.model.width, self.tp > 1  # a message is between norm and product
        norm = (self.shared if in_pieces else self.positions) * (width + 1) * self.itemsize
        return norm + (0 if self.again and not in_pieces else self.positions * width * itemsize)

    def _attention(self) -> int:
        parallel, heads, kv_heads = self.config.parallel, self.config.model.heads // self.tp, self.kv_heads
        if parallel.cp > 1 and parallel.context == "gather":
            kv_heads *= parallel.cp
        elif parallel.cp > 1 and parallel.context == "ulysses":
            kv_heads = max(kv_heads, parallel.cp)
        kept = self.head_width * (heads + 2 * kv_heads) * self.itemsize
        in_pieces = parallel.cp > 1 or (parallel.tp > 1 and parallel.async_tp)  # then attention isn't one segment
        if not self.again or in_pieces:
            kept += heads * (self.head_width + 1) * self.itemsize
            if heads > 1 or self.factor < self.itemsize:  # a single head lies side by side with itself
                kept += heads * self.head_width * self.factor
        return self._normed(self.factor) + self.positions * kept

    def _feed_forward(self) -> int:
        of_unit = 2 * self.itemsize if self.again else 3 * self.itemsize + self.factor
        return self._normed(self.factor) + self.positions * of_unit * self.config.model.ffn // self.tp

    def _mask(self, segment: int) -> int:
        """Numbers that are added to the scores, unless these are causal alone. Over cp they are made tile by tile, and not counted."""
        separate = self.config.data.documents == "separate"
        if self.config.parallel.cp > 1 or not (separate or self.segments > 1):
            return 0
        return (self.config.batch.micro if separate else 1) * self.length * (segment + 1) * self.length

    def _head(self) -> int:
        model = self.config.model
        normed = self._normed(self.itemsize) if self.tp > 1 else self.positions * (2 * model.width + 1) * self.itemsize
        return normed + self.positions * model.vocab // self.tp * max(4, self.itemsize)  # probabilities are fp32 at least

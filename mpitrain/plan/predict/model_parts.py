"""What a model is made of: parameters and FLOPs by part, and activations of a block by formula.

FLOPs are those of a training step: six for each weight that a token is multiplied with, and the
scores of attention, of which a causal mask leaves half.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from mpitrain.plan.declared.formatting import aligned
from mpitrain.plan.declared.layer import Layer
from mpitrain.plan.plan import Plan

# by what is in a parameter's name, the first that fits
PART_OF = {
    "mtp.": "further tokens",
    "embedding.": "embedding",
    "head.": "head",
    "attention.": "attention",
    ".router.": "router",
    ".experts.": "experts",
    ".shared.": "shared experts",
    "ffn.": "feed-forward",
}
LAST = "head", "further tokens"
OTHER = "other"
OF_A_TOKEN = 6.0  # FLOPs of a weight: forward, the gradient of its input and its own


class ModelPart(NamedTuple):
    """parameters: of all; active: of those that a token meets. flops: of a token in a training step."""

    parameters: int = 0
    active: float = 0.0
    flops: float = 0.0

    def plus(self, parameters: int = 0, active: float = 0.0, flops: float = 0.0) -> "ModelPart":
        return ModelPart(self.parameters + parameters, self.active + active, self.flops + flops)


def part_of(name: str) -> str:
    """Return the part that a parameter belongs to; a layer of the user's own may have any names."""
    return next((part for words, part in PART_OF.items() if words in name), OTHER)


def model_parts(plan: Plan) -> dict[str, ModelPart]:
    """Return the parts of a model, from the embedding to the head; one embedding, if it is tied."""
    parts: defaultdict[str, ModelPart] = defaultdict(ModelPart)
    for spec in plan.parameters():
        part = part_of(spec.name)
        parts[part] = parts[part].plus(spec.numel, spec.numel * spec.active)
    for layer in plan.layers:
        for part, flops in _flops_of(layer, plan.config.data.sequence):
            parts[part] = parts[part].plus(flops=flops)
    if "experts" in parts and not parts["feed-forward"].flops:  # the norms before experts alone
        parts["experts"] = parts["experts"].plus(*parts.pop("feed-forward"))
    names = [part_of(spec.name) for layer in plan.layers for spec in layer.parameters()]
    order = (*(name for name in (*names, OTHER) if name not in LAST), *LAST)
    return {part: parts[part] for part in order if part in parts}


def _flops_of(layer: Layer, sequence: int) -> Iterator[tuple[str, float]]:
    """Yield the FLOPs of a layer's parts: of some by their weights, of the last by what is left."""
    total = layer.flops(sequence)
    weights: defaultdict[str, int] = defaultdict(int)
    for spec in layer.parameters():
        weights[part_of(spec.name)] += spec.numel * (len(spec.shape) > 1)
    if not total:
        return
    if "head" in weights and not weights["head"]:  # tied: the head multiplies with the embedding's weight
        weights["head"] = weights.pop("embedding", 0)
    several = next((part for part in ("further tokens", "experts") if part in weights), "")
    for part, numel in weights.items():
        if several and part != several and part in ("head", "router", "shared experts"):
            yield part, OF_A_TOKEN * numel
            total -= OF_A_TOKEN * numel
    single = next((part for part in ("head", "attention", "feed-forward") if part in weights), OTHER)
    yield several or single, total


def parts_table(plan: Plan) -> str:
    """Draw the parts: parameters, and FLOPs of a token and of a step."""
    config = plan.config
    parts = model_parts(plan)
    total = ModelPart()
    for part in parts.values():
        total = total.plus(*part)
    tokens = config.batch.global_ * config.data.sequence
    rows = [("part", "parameters", "%", "of a token", "FLOPs a token", "%", "FLOPs a step")]
    for name, part in (*parts.items(), ("all", total)):
        rows.append(
            (
                name, f"{part.parameters:,}", f"{100 * part.parameters / total.parameters:.1f}",
                f"{part.active:,.0f}", f"{part.flops:.3g}", f"{100 * part.flops / (total.flops or 1):.1f}",
                f"{part.flops * tokens:.3g}",
            )
        )  # fmt: skip
    return aligned(rows)


def activation_line(plan: Plan) -> str:
    """Say what a block keeps of a microbatch by the formulas that papers use, with this model's numbers.

    arXiv:2205.05198, equation 2, section 5 and table 2: of a feed-forward of 4 h with dropout, in 16 bits.
    """
    model, batch, sequence = plan.config.model, plan.config.batch.micro, plan.config.data.sequence
    size = sequence * batch * model.width
    scores = 5 * model.heads * sequence / model.width
    bytes_by_mode = {"all": size * (34 + scores), "selective or flash": size * 34.0, "full": size * 2.0}
    words = ", ".join(f"{mode} {num_bytes / 1e6:,.2f} MB" for mode, num_bytes in bytes_by_mode.items())
    return (
        f"a block of {batch} x {sequence} tokens by formula, sbh (34 + 5as / h) bytes, 34 sbh, 2 sbh: "
        f"{words} (arXiv:2205.05198: 16 bits, feed-forward of 4 h, divided by tp with sequence parallelism)"
    )

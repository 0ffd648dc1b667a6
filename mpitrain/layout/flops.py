"""Model FLOPs of a token. The definition is printed with every run.

Per token 6 FLOPs for each weight of a matrix product (the embedding lookup is none), forward and backward, and 6 * T * D per layer
for causal attention: half of the 12 * T * D of PaLM (arXiv:2204.02311, appendix B), because half of the scores are masked.
Recomputation would not be counted.
"""

from mpitrain.config import Config
from mpitrain.layout.parameters import EMBEDDING, parameters_of

DEFINITION = "model FLOPs (6 per matrix weight and token, causal attention halved, no recomputation) / peak of all ranks"


def flops_per_token(config: Config) -> float:
    """Return the model FLOPs of one token in one training step."""
    weights = sum(spec.numel for spec in parameters_of(config) if len(spec.shape) > 1 and spec.name != EMBEDDING)
    if config.model.tied:
        weights += config.model.vocab * config.model.width
    return 6.0 * weights + 6.0 * config.model.layers * config.data.sequence * config.model.width

"""Experts of a layout: what the configuration left open, and which ranks they are spread over.

Integers and names only.

The ranks of one pipeline rank, which the dense layers see as tp x cp x dp, are for the experts etp
x ep x edp, etp fastest (parallel folding, arXiv:2504.14960, section 3.2). With tp=2 dp=2 and ep=2:

    rank      0     1     2     3
    tp, dp   0,0   1,0   0,1   1,1
    ep, edp  0,0   1,0   0,1   1,1       experts live on 0 and 1, and once more on 2 and 3
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from mpitrain.config import NEUTRAL, Config, ExpertsTable, Parallel
from mpitrain.plan.declared.family import ModelFamily
from mpitrain.plan.declared.resolved import ResolvedConfig, ResolvedExperts, ResolvedModel, filled

# which every family has
OF_A_LAYOUT = {key: getattr(ExpertsTable(), key) for key in ("capacity", "buffer", "dispatch")}
# Switch Transformers (arXiv:2101.03961, section 2.2); DeepSeek-V3 (arXiv:2412.19437, section 4.2)
OF_A_LOSS = 0.01
OF_A_BIAS = 1e-3


def ranks_of_pipeline_rank(parallel: Parallel) -> int:
    """Return how many ranks the experts of a stage can be spread over."""
    return parallel.tp * parallel.cp * parallel.dp


def resolve_experts(
    table: ExpertsTable, model: ResolvedModel, family: ModelFamily, preset: Mapping[str, Any]
) -> ResolvedExperts:
    """Fill in what the table `experts` left open. Raises ConfigError for keys that the family hasn't."""
    given = {key: value for key, value in msgspec.structs.asdict(table).items() if value not in (None, "")}
    if family.experts is None:
        family.refuse_unused(model.family, "experts", given, NEUTRAL["experts"] | OF_A_LAYOUT)
        return filled(ResolvedExperts, table, **NEUTRAL["experts"])
    defaults = {"width": model.ffn, **family.experts, **preset}
    balance = given.get("balance", defaults["balance"])
    if balance != defaults["balance"]:  # of another one weight and rate say nothing
        defaults = {k: value for k, value in defaults.items() if k not in ("balance_weight", "bias_rate")}
    if balance == "bias":
        of_balance = {"bias_rate": OF_A_BIAS, "balance_weight": 0.0}
    else:
        of_balance = {"balance_weight": 0.0 if balance == "none" else OF_A_LOSS}
    return ResolvedExperts(**of_balance | defaults | given)


def fitting_degrees(count: int, ranks: int, etp: int) -> str:
    """Say which ep would work."""
    divisors = [str(n) for n in range(1, min(ranks, count) + 1) if count % n == 0 and ranks % (n * etp) == 0]
    return f"ep = {', '.join(divisors)}" if divisors else "an etp that divides the ranks"


def open_to_token(experts: ResolvedExperts) -> int:
    """Return how many experts a token can be sent to, by the groups that it chooses."""
    return experts.count // experts.groups * experts.groups_active


def positions(config: Config, parallel: Parallel) -> int:
    """Return the positions of one sequence that a rank sends to the experts, of the longest segment."""
    return config.data.sequence // (parallel.cp * (parallel.tp if parallel.sequence else 1))


def rows_at_once(config: ResolvedConfig, segments: int = 1) -> int:
    """Return how many rows of experts' inputs a rank holds at once.

    `buffer` times what comes to it when all experts have equal loads.
    """
    experts, parallel = config.experts, config.parallel
    balanced = config.batch.micro * positions(config, parallel) // segments * experts.active * parallel.etp
    return math.floor(experts.buffer * balanced + 1e-9)


def most_rows(config: ResolvedConfig, segments: int = 1) -> int:
    """Return how many rows of a microbatch can come to a rank at once: at most as many as it holds."""
    experts, parallel = config.experts, config.parallel
    sent = config.batch.micro * positions(config, parallel) // segments
    all_here = sent * parallel.ep * parallel.etp * min(experts.active, experts.count // parallel.ep)
    return min(rows_at_once(config, segments), all_here)

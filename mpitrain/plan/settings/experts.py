"""Experts of a layout: what the configuration left open, and which ranks they are spread over.

Integers and names only.

The ranks of one pipeline rank, which the dense layers see as tp x cp x dp, are for the experts etp
x ep x edp, etp fastest (parallel folding, arXiv:2504.14960, section 3.2). With tp=2 dp=2 and ep=2:

    rank      0     1     2     3
    tp, dp   0,0   1,0   0,1   1,1
    ep, edp  0,0   1,0   0,1   1,1       experts live on 0 and 1, and once more on 2 and 3
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from mpitrain.config import NEUTRAL, Config, ExpertsTable, Parallel
from mpitrain.errors import ConfigError
from mpitrain.plan.declared.family import ModelFamily, with_experts
from mpitrain.plan.declared.optimizers import optimizer_kind
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
    config: Config,
    model: ResolvedModel,
    family: ModelFamily,
    preset: Mapping[str, Any],
) -> ResolvedExperts:
    """Fill in what the table `experts` left open.

    Raises ConfigError for what would do nothing, and for what can't be.
    """
    values = {key: getattr(config.experts, key) for key in ExpertsTable.__struct_fields__}
    given = {key: value for key, value in values.items() if value is not None and value != ""}
    if family.experts is None:
        for key in ("routing", "expert_load"):
            if value := getattr(config.run, key):
                raise ConfigError(
                    f"run.{key} = {value}: model.family = {json.dumps(model.family)} has no experts; "
                    "leave it out"
                )
        family.refuse_unused(model.family, "experts", given, NEUTRAL["experts"] | OF_A_LAYOUT)
        return filled(ResolvedExperts, config.experts, **NEUTRAL["experts"])
    defaults = {"width": model.ffn, **family.experts, **preset}
    balance = given.get("balance", defaults["balance"])
    if balance != defaults["balance"]:  # of another one weight and rate say nothing
        defaults = {
            key: value for key, value in defaults.items() if key not in ("balance_weight", "bias_rate")
        }
    keys = defaults | given
    if balance == "bias":
        keys = {"bias_rate": OF_A_BIAS, "balance_weight": 0.0, **keys}
    else:
        keys = {"balance_weight": 0.0 if balance == "none" else OF_A_LOSS, **keys}
    experts = ResolvedExperts(**keys)
    _refuse_impossible(experts)
    _refuse_impossible_load(config.run.expert_load, experts)
    return experts


def _refuse_impossible(experts: ResolvedExperts) -> None:
    for key in NEUTRAL["experts"]:
        if not getattr(experts, key):
            raise ConfigError(
                f"experts.{key} = 0 in a family with experts; needed 1 or more; leave it out for the "
                "family's own number, or choose another model.family"
            )
    if experts.active > experts.count:
        raise ConfigError(
            f"experts.active = {experts.active} of experts.count = {experts.count}; send a token to fewer, "
            "or have more"
        )
    if experts.count % experts.groups:
        raise ConfigError(
            f"experts.groups = {experts.groups} doesn't divide experts.count = {experts.count}; use a divisor"
        )
    if experts.groups_active > experts.groups:
        raise ConfigError(
            f"experts.groups_active = {experts.groups_active} of experts.groups = {experts.groups}; use at "
            "most as many"
        )
    open_to_token = experts.count // experts.groups * experts.groups_active
    if experts.active > open_to_token:
        raise ConfigError(
            f"experts.active = {experts.active}, but {experts.groups_active} of {experts.groups} groups have "
            f"{open_to_token} experts; raise experts.groups_active, or send a token to fewer"
        )
    if experts.balance != "bias" and experts.bias_rate is not None:
        raise ConfigError(
            f"experts.bias_rate = {experts.bias_rate} does nothing with experts.balance = "
            f'"{experts.balance}"; use "bias"'
        )
    if experts.balance == "none" and experts.balance_weight:
        raise ConfigError(
            f'experts.balance_weight = {experts.balance_weight} does nothing with experts.balance = "none"; '
            'use "microbatch", "sequence", "global" or "bias"'
        )


def _refuse_impossible_load(load: float, experts: ResolvedExperts) -> None:
    if load and not 1 <= load <= experts.count:
        raise ConfigError(
            f"run.expert_load = {load}: tokens of the most loaded rank over the mean are 1 to "
            f"experts.count = {experts.count}; leave it out for an estimate"
        )
    if load and experts.replay:
        raise ConfigError(
            f"run.expert_load = {load} with experts.replay, which says how tokens load experts; leave one out"
        )


def refuse_unfolded(
    model: ResolvedModel,
    experts: ResolvedExperts,
    parallel: Parallel,
    config: Config,
) -> None:
    """Raise ConfigError unless the experts can be spread over the ranks as asked."""
    if experts.count:
        _refuse_uneven(experts, parallel)
        _refuse_company(experts, parallel, config)
        least = 1 / (config.batch.micro * positions(config, parallel) * experts.active)
        if rows_at_once(config, experts, parallel) < 1:
            raise ConfigError(
                f"experts.buffer = {experts.buffer}: a rank can't receive one token at once; use {least:.2g} "
                "or more"
            )
    else:
        ep, etp = parallel.ep, parallel.etp
        for key, degree in (("ep", ep), ("etp", etp)):
            if degree > 1:
                without = f"model.family = {json.dumps(model.family)} has no experts"
                raise ConfigError(f"parallel.{key} = {degree}: {without}; use {', '.join(with_experts())}")


def _refuse_uneven(experts: ResolvedExperts, parallel: Parallel) -> None:
    """Raise ConfigError unless ranks, experts and their widths divide as asked."""
    ep = parallel.ep
    etp = parallel.etp
    ranks = ranks_of_pipeline_rank(parallel)
    dense = (
        f"parallel.tp x parallel.cp x parallel.dp = {parallel.tp} x {parallel.cp} x {parallel.dp} = {ranks} "
        "ranks"
    )
    if ranks % (ep * etp):
        what = (
            f"parallel.ep x parallel.etp = {ep} x {etp} doesn't divide {dense}, over which experts are folded"
        )
        raise ConfigError(f"{what}; use {_fitting(experts.count, ranks, etp)}")
    if experts.count % ep:
        fitting = _fitting(experts.count, ranks, etp)
        raise ConfigError(
            f"experts.count = {experts.count} doesn't divide over parallel.ep = {ep}; use {fitting}"
        )
    if experts.width % etp:
        raise ConfigError(
            f"experts.width = {experts.width} doesn't divide over parallel.etp = {etp}; use an etp that "
            "divides it"
        )


def _refuse_company(experts: ResolvedExperts, parallel: Parallel, config: Config) -> None:
    """Raise ConfigError for settings of others with which experts can't be trained."""
    if parallel.tp > 1 and not parallel.sequence:
        raise ConfigError(
            "parallel.sequence = false with experts and parallel.tp > 1: each rank sends its own tokens to "
            "the experts; use parallel.sequence = true"
        )
    if config.numerics.reproducible == "layout" and parallel.ep * parallel.etp > 1:
        raise ConfigError(
            'numerics.reproducible = "layout" with parallel.ep x parallel.etp > 1: tokens of several ranks '
            "meet in one product, not in a "
            "tree of sums; use ep = 1"
        )
    if experts.capacity and config.pipeline.schedule == "seq1f1b":
        raise ConfigError(
            f'experts.capacity = {experts.capacity} with pipeline.schedule = "seq1f1b": an expert has room '
            "for its part of a microbatch, "
            "and segments come one after another; leave experts.capacity out, or use another schedule"
        )
    if optimizer_kind(config.optimizer).whole_matrices:
        raise ConfigError(
            f"optimizer.name = {json.dumps(config.optimizer.name)} with experts: their matrices are stored "
            'together, and it knows single ones; use "adamw"'
        )
    if config.memory.offload in ("activations", "all"):
        raise ConfigError(
            f'memory.offload = "{config.memory.offload}" with experts: other numbers of rows come each time, '
            'and buffers in host memory are of one length; use "optimizer", or memory.recompute'
        )
    if config.precision.compute == "fp8":
        raise ConfigError(
            'precision.compute = "fp8" with experts: their grouped products have no fp8 yet; use "bf16"'
        )


def _fitting(count: int, ranks: int, etp: int) -> str:
    """Say which ep would work."""
    divisors = [str(n) for n in range(1, min(ranks, count) + 1) if count % n == 0 and ranks % (n * etp) == 0]
    return f"ep = {', '.join(divisors)}" if divisors else "an etp that divides the ranks"


def positions(config: Config, parallel: Parallel) -> int:
    """Return the positions of one sequence that a rank sends to the experts, of the longest segment."""
    return config.data.sequence // (parallel.cp * (parallel.tp if parallel.sequence else 1))


def rows_at_once(
    config: Config,
    experts: ResolvedExperts,
    parallel: Parallel,
    segments: int = 1,
) -> int:
    """Return how many rows of experts' inputs a rank holds at once.

    `buffer` times what comes to it when all experts have equal loads.
    """
    balanced = config.batch.micro * positions(config, parallel) // segments * experts.active * parallel.etp
    return math.floor(experts.buffer * balanced + 1e-9)


def most_rows(config: ResolvedConfig, segments: int = 1) -> int:
    """Return how many rows of a microbatch can come to a rank at once: as many as it holds, if
    there can be so many.
    """
    experts = config.experts
    parallel = config.parallel
    sent = config.batch.micro * positions(config, parallel) // segments
    all_here = sent * parallel.ep * parallel.etp * min(experts.active, experts.count // parallel.ep)
    return min(rows_at_once(config, experts, parallel, segments), all_here)

"""Types of a resolved configuration: which keys `resolve` (plan/settings/resolve.py) has always filled.

A key that a file may leave out is `X | None` in `Config`; the classes below say, for mypy and readers,
of which keys the None is gone. At run time they are the classes of config.py, so that a resolved
configuration is equal to what a run's config.toml is read as.
"""

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from mpitrain.config import AttentionTable, Config, ConfigTable, ExpertsTable, Model, Parallel, Pipeline

if TYPE_CHECKING:

    class ResolvedModel(Model, kw_only=True, frozen=True):
        layers: int
        width: int
        heads: int
        kv_heads: int
        ffn: int
        vocab: int
        vocab_multiple: int
        padding: int
        tied: bool
        mtp: int
        mtp_weight: float

    class ResolvedAttention(AttentionTable, kw_only=True, frozen=True):
        head_width: int
        yarn_length: int
        dynamic_length: int
        llama3_length: int
        kv_rank: int
        rotary_width: int
        value_width: int

    class ResolvedExperts(ExpertsTable, kw_only=True, frozen=True):
        count: int  # 0: no experts
        active: int
        width: int
        groups: int
        groups_active: int
        every: int

    class ResolvedParallel(Parallel, kw_only=True, frozen=True):
        zero: int

    class ResolvedPipeline(Pipeline, kw_only=True, frozen=True):
        chunks: int

    class ResolvedConfig(Config, kw_only=True, frozen=True):
        model: ResolvedModel
        attention: ResolvedAttention
        experts: ResolvedExperts
        parallel: ResolvedParallel
        pipeline: ResolvedPipeline

else:
    ResolvedModel = Model
    ResolvedAttention = AttentionTable
    ResolvedExperts = ExpertsTable
    ResolvedParallel = Parallel
    ResolvedPipeline = Pipeline
    ResolvedConfig = Config

Resolved = TypeVar("Resolved", bound=ConfigTable)


def filled(kind: type[Resolved], table: ConfigTable, **values: Any) -> Resolved:
    """Return a table with values for some keys, now that its keys are as `kind` has them."""
    return kind(**msgspec.structs.asdict(table) | values)

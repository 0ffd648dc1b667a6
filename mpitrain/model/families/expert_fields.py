"""Experts, and which blocks have them, in config.json."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.model.families.fields import Flag, Number, Whole
from mpitrain.model.families.sparse import has_experts
from mpitrain.plan.declared.hugging_face import ConfigField, Fields
from mpitrain.plan.declared.resolved import ResolvedConfig


class WidthOfExperts:
    """intermediate_size, which is that of an expert. After the sizes."""

    def read(self, fields: Fields) -> None:
        fields.give("experts.width", fields.keys["model.ffn"], "intermediate_size")

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return dict(intermediate_size=config.experts.width)


def routed(count: int, active: int, name: str = "num_local_experts") -> tuple[ConfigField, ...]:
    """Return how many experts there are, and how many a token meets: the class's defaults."""
    return (Whole(name, "experts.count", count), Whole("num_experts_per_tok", "experts.active", active))


class SparseBlocks:
    """Which blocks have experts, as Qwen says it: every decoder_sparse_step-th but mlp_only_layers."""

    def read(self, fields: Fields) -> None:
        layers = fields.keys["model.layers"]
        step = fields.integer("decoder_sparse_step", 1)
        without = fields.take("mlp_only_layers", [])
        if not isinstance(without, list) or not all(isinstance(block, int) for block in without):
            fields.refuse("mlp_only_layers", "needed a list of numbers of layers")
        dense = set(without)
        wanted = [(number + 1) % step == 0 and number not in dense for number in range(layers)]
        for first, every in ((0, step), first_and_every(wanted)):
            if wanted == has_experts(layers, first, every):
                fields.give("experts.first", first, "mlp_only_layers")
                fields.give("experts.every", every, "decoder_sparse_step")
                return
        fields.refuse("mlp_only_layers", "no experts.first and experts.every mean these blocks")

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        first, every = config.experts.first, config.experts.every
        if first == 0:
            return dict(decoder_sparse_step=every, mlp_only_layers=[])
        blocks = has_experts(config.model.layers, first, every)
        dense = [number for number, sparse in enumerate(blocks) if not sparse]
        return dict(decoder_sparse_step=1, mlp_only_layers=dense)


def first_and_every(wanted: Sequence[bool]) -> tuple[int, int]:
    """Return the only experts.first and experts.every that may mean these blocks; they needn't."""
    sparse = [number for number, is_sparse in enumerate(wanted) if is_sparse]
    if not sparse:
        return len(wanted), 1
    every = sparse[1] - sparse[0] if len(sparse) > 1 else sparse[0] + 1
    return max(0, sparse[0] + 1 - every), every


@dataclass(frozen=True)
class DenseBlocks:
    """How many blocks before the first with experts have none. default: the class's."""

    default: int

    def read(self, fields: Fields) -> None:
        fields.integer("first_k_dense_replace", self.default, least=0, to="experts.first")

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        experts = config.experts
        blocks = has_experts(config.model.layers, experts.first, experts.every)
        first = (*blocks, True).index(True)
        if not all(blocks[first:]):
            raise ConfigError(
                f"experts.every = {experts.every} can't be written: {config.model.family} has experts in all "
                "blocks after the first ones; use 1"
            )
        return dict(first_k_dense_replace=first)


class NoFurtherTokens(ConfigField):
    """Blocks that predict further tokens aren't written; weights/keys.py reads how many there are."""

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        return dict(num_nextn_predict_layers=0)


def shared_and_routed(
    dense: int, count: int, width: int, groups: tuple[int, int], scale: float
) -> tuple[ConfigField, ...]:
    """Return the experts of DeepSeek-V3 and GLM-4.5, with the class's defaults.

    dense: blocks without experts. groups: of experts, and of these as many as a token meets.
    """
    return (
        DenseBlocks(dense),
        *routed(count, 8, "n_routed_experts"),
        Whole("n_shared_experts", "experts.shared", 1, least=0, null=0),
        Whole("moe_intermediate_size", "experts.width", width),
        Whole("n_group", "experts.groups", groups[0]),
        Whole("topk_group", "experts.groups_active", groups[1]),
        Flag("norm_topk_prob", "experts.normalised", True),
        Number("routed_scaling_factor", "experts.scale", scale),
        NoFurtherTokens(),
    )

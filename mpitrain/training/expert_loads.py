"""Load balancing of experts: how evenly they are used, as lines of metrics.jsonl."""

from collections.abc import Sequence

from mpitrain.actor.actor import Actor

# with a validation: by block, the share that each expert had of the choices of the step
KEY = "expert_loads"


def shares(actor: Actor) -> dict[str, list[float]]:
    """Return the loads of the last step by block, of those blocks that this rank counts."""
    pieces = (piece for piece in actor.gradients.counted if piece.spec.group == "load")
    return {
        piece.spec.name.removeprefix("blocks.").partition(".ffn")[0]: piece.weight.tolist()
        for piece in pieces
    }


def together(rank_shares: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the loads of all ranks, in the order of the blocks.

    "0", "1", ..., and those that predict further tokens, "mtp.0", ...
    """

    def place(item: tuple[str, list[float]]) -> tuple[bool, int]:
        further, _, number = item[0].rpartition(".")
        return bool(further), int(number)

    return dict(sorted((item for part in rank_shares for item in part.items()), key=place))

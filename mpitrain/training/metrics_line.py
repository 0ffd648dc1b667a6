"""What metrics.jsonl has of a step: loss, learning rate, tokens/s, MFU, load balancing of experts."""

import time
from collections.abc import Sequence

from mpitrain.actor.actor import Actor
from mpitrain.actor.step_work import StepResult
from mpitrain.comm.base.world import World
from mpitrain.training.recovery import RunCounts


class MetricsLine:
    """Makes the line of a step.

    step_tokens: read in a step, whether their targets carry loss or not.
    attended_length: of a sequence. peak_flops: of all ranks.
    """

    def __init__(self, actor: Actor, step_tokens: int, attended_length: int, peak_flops: float):
        self._actor = actor
        self._step_tokens = step_tokens
        plan = actor.plan
        length = min(attended_length, plan.config.data.sequence)
        self._sequence = plan.run_config.data.sequence
        self._flops = plan.flops_per_token(length) / peak_flops
        self._recomputed_flops = plan.recomputed_flops_per_token(length) / peak_flops

    def of_step(
        self, result: StepResult, counts: RunCounts, rollbacks: int, lr: float, step_s: float
    ) -> dict:
        """Return the line of a step that is counted."""
        tokens_per_s = self._step_tokens / step_s
        scale = self._actor.loss_scale
        return {
            "step": counts.step,  # number of the step; 0 before training, with a validation only
            "loss": result.loss,  # mean cross-entropy of the step's tokens, in nats
            "grad_norm": result.grad_norm,  # norm of all gradients before clipping
            "lr": lr,  # learning rate of the step
            "tokens": counts.tokens,  # tokens trained on so far
            # tokens of the data's order read so far, those of steps that were rolled back too
            "read": counts.sequences * self._sequence,
            "tokens_per_s": tokens_per_s,  # of all ranks, in this step
            "step_s": step_s,  # seconds of the step on rank 0
            "time": time.time(),  # when the step was over on rank 0, in seconds since 1970
            # seconds that the model FLOPs of the step take at the peak of all ranks: step_s * mfu
            "theoretical_s": self._step_tokens * self._flops,
            "mfu": tokens_per_s * self._flops,  # model FLOPs utilisation, a share of the peak of all ranks
            # hardware FLOPs utilisation: the same with what memory.recompute and pipeline.recompute repeat
            "hfu": tokens_per_s * (self._flops + self._recomputed_flops),
            "skipped": counts.skipped,  # updates left out so far, for gradients or spikes
            # factor of the loss with dynamic loss scaling (fp16)
            **({"loss_scale": scale.value} if scale.dynamic else {}),
            # most microbatches whose activations a rank held at once
            "peak_in_flight": result.peak_in_flight,
            # rollbacks so far, if there were some (spikes.do)
            **({"rollbacks": rollbacks} if rollbacks else {}),
            **result.noise,
            **result.metrics,
        }


def expert_loads(actor: Actor, world: World) -> dict[str, list[float]]:
    """Return each expert's share of the last step's choices, by block. Collective."""
    mine = {
        piece.spec.name.removeprefix("blocks.").partition(".ffn")[0]: piece.weight.tolist()
        for piece in actor.gradients.counted
        if piece.spec.group == "load"
    }
    return together(world.all_gather("the loads of experts", mine))


def together(rank_shares: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Return the loads of all ranks, in the order of blocks: "0", "1", ..., "mtp.0", ..."""

    def place(item: tuple[str, list[float]]) -> tuple[bool, int]:
        further, _, number = item[0].rpartition(".")
        return bool(further), int(number)

    return dict(sorted((item for part in rank_shares for item in part.items()), key=place))

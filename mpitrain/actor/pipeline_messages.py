"""SEND and RECV: activations and gradients between pipeline stages on different ranks."""

from collections.abc import Sequence

import torch

from mpitrain.actor.step_work import Work
from mpitrain.comm.base.world import ExpectedAction
from mpitrain.comm.links import Links
from mpitrain.model.build_context import BuildContext
from mpitrain.plan.plan import Plan
from mpitrain.schedules.actions import Action
from mpitrain.schedules.lowering.needs import partner

AHEAD = 2  # receives posted before they are needed


class PipelineMessages:
    """What a rank sends to other stages and receives; the next receives are posted ahead."""

    def __init__(self, plan: Plan, links: Links, site: BuildContext):
        self._plan = plan
        self._rank_of = plan.table.rank_of
        self._links = links
        self._site = site

    def begin(self, instructions: Sequence[Action], work: Work) -> None:
        """Take note of what is to be received, and post the first receives."""
        work.to_receive.extend(a for a in instructions if a.kind in ("RECV_F", "RECV_B"))
        self._post(work)

    def send(self, action: Action, work: Work) -> None:
        """Start SEND, whose output is kept until it has left."""
        kind, m, stage, _ = action
        to = stage + 1 if kind == "SEND_F" else stage - 1
        output, expected = work.outputs.pop(action), _expected(action, work)
        pending = self._links.send(kind[-1], to, m, output, self._rank_of[to], expected)
        # what has left is freed
        work.sending = [*(earlier for earlier in work.sending if not earlier.done), pending]

    def receive(self, action: Action, work: Work) -> None:
        """Wait for RECV, and post the next one."""
        kept = work.inputs if action.kind == "RECV_F" else work.grads
        kept[action.stage, action.index] = work.receiving.pop(action).wait()
        self._post(work)

    def _post(self, work: Work) -> None:
        while work.to_receive and len(work.receiving) < AHEAD:
            action = work.to_receive.popleft()
            kind, m, stage, _ = action
            source = stage - 1 if kind == "RECV_F" else stage + 1
            shape, site = self._plan.activation_shape(), self._site
            buffer = torch.empty(shape, dtype=site.dtype, device=site.device)
            work.receiving[action] = self._links.receive(
                kind[-1], stage, m, buffer, self._rank_of[source], _expected(action, work)
            )


def _expected(action: Action, work: Work) -> ExpectedAction:
    """Return what another rank has to do so that a message of this one arrives."""
    end = partner(action)
    return ExpectedAction(str(end), work.ends[end])

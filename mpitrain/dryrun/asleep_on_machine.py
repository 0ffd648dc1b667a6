"""How long a rank of a dry run sleeps for an instruction, on a machine (--machine).

Seconds of computations and of the update, as `mpitrain plan` predicts them, on a core or a GPU of
its own. What waits for messages is left out: those are real. Only such a dry run imports it.
"""

from mpitrain.dryrun.asleep import Asleep, num_parts
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.optimizer_seconds import update_seconds
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.stage_seconds import StageSeconds, stages_of
from mpitrain.plan.predict.step_time.step_model import step_model
from mpitrain.schedules.actions import COMPUTE, UPDATE, Action


def on_machine(plan: Plan, name: str, node_ranks: int) -> Asleep:
    """Return how long a rank of a machine is predicted to compute for an instruction.

    name: of jobs/machines/, or a file. node_ranks: of the job. Raises ConfigError for an unknown one.
    """
    config = plan.config
    machine = machine_of(find_machine(name)).with_ranks_per_node(config.comm.node_ranks or node_ranks)
    model, layout = step_model(plan), layout_of(config, machine, plan.routing)
    stages = stages_of(model, layout, machine)
    table = plan.table
    update = update_seconds(model, layout, machine)
    of_kinds = [_alone(stage) for stage in stages]

    def seconds(action: Action) -> float:
        if action.kind == UPDATE.kind:
            return update
        if action.kind not in COMPUTE:
            return 0.0
        whole = of_kinds[action.stage % table.depth][action.kind]
        return whole / table.segments / num_parts(plan, action)

    return Asleep(seconds, f"asleep for what is predicted of {machine.name}")


def _alone(stage: StageSeconds) -> dict[str, float]:
    """Return seconds by kind of computation of a microbatch, without what waits for messages."""
    forward = sum(stage.exposed_forward.values())
    backward = sum(stage.exposed.values()) - forward
    return {
        "F": max(0.0, stage.forward - forward),
        "B": max(0.0, stage.inputs + stage.weights - backward),
        "I": max(0.0, stage.inputs - backward),
        "W": stage.weights,
        "R": max(0.0, stage.forward - forward),
    }

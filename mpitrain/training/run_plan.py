"""The plan of a run: its configuration with the model of model.init, a layout, and advice on it.

Light: each of the hundreds of ranks of a dry run imports it (docs/guides/dry-run.md).
"""

from mpitrain.cluster.rundir import RunDir, read_config
from mpitrain.comm.base.world import World
from mpitrain.config import Config, LoadedConfig, plugins_of
from mpitrain.data.tokenizer import Vocabulary
from mpitrain.inputs import kind_of
from mpitrain.model.families.catalog import plan_for
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.gpu_share import GpuShare, may_have_gpus
from mpitrain.plan.settings.job_ranks import JobRanks
from mpitrain.planner.layout_request import AnsweredLayout, LayoutRequest
from mpitrain.training.agreement import require_same_configuration


def beginning(given: LoadedConfig) -> tuple[LoadedConfig, list[str]]:
    """Return a configuration with the model of model.init, and what is to be said of it."""
    config = given.config
    if not config.model.init:
        return given, []
    from mpitrain.weights.beginning import begins, has_steps  # with it comes h5py

    rundir = RunDir(config.run.dir)
    before = None
    if has_steps(rundir.checkpoints) and kind_of(rundir.config) == "a file":
        recorded = read_config(rundir.config, plugins_of(config))
        before = recorded if recorded.model.init == config.model.init else None
    begun = begins(given, before)
    return begun.given, begun.lines


def agreed_layout(
    given: LoadedConfig, world: World, vocabulary: Vocabulary, look_at_gpus: bool = True
) -> AnsweredLayout:
    """Return the answer of rank 0 on all ranks, whose configurations must be alike. Collective.

    look_at_gpus: torch may be loaded for that.
    Raises InputError or MeshError, alike on all ranks.
    """
    config = given.config
    require_same_configuration(world, config)
    asks = config.run.layout != "default" and not config.memory.limit_gb and not config.run.machine
    gpu = gpu_share(config, world) if look_at_gpus and asks else None
    request = LayoutRequest(config, given.origins, ranks_of(world), vocabulary, gpu)
    return world.on_first_rank("choosing a layout", lambda: _chosen(request))


def _chosen(request: LayoutRequest) -> AnsweredLayout:
    from mpitrain.planner.run_layout import choose_layout  # its memory is taken on one rank only

    return choose_layout(request)


def gpu_share(config: Config, world: World) -> GpuShare | None:
    """Return the smallest share of a GPU that a rank would have, None without GPUs. Collective."""
    looks = config.run.device != "cpu" and may_have_gpus()
    if not any(world.all_gather("who has a driver for GPUs", looks)):
        return None
    from mpitrain.training.machine.device_placement import looked_for, take_turns  # torch

    node_gpus = world.on_every_rank("looking for a device", lambda: looked_for(config))
    placement = take_turns(node_gpus, world)
    mine = None
    if placement.gpu is not None:
        mine = GpuShare(placement.gpu.name, placement.gpu.memory_bytes // len(placement.sharers))
    shares = [share for share in world.all_gather("what they have of GPUs", mine) if share]
    return min(shares, key=lambda share: share.num_bytes, default=None)


def ranks_of(world: World) -> JobRanks:
    """Return the ranks of this job. It sends nothing."""
    return JobRanks(world.size, world.num_nodes, world.node_ranks)


def judged_advice(config: Config, plan: Plan, world: World, vocabulary: Vocabulary) -> list[str]:
    """Return rank 0's advice on a layout. Collective; raises ConfigError for too little memory."""

    def judged() -> list[str]:
        from mpitrain.plan.predict.step_time.advice import judge  # on one rank of many

        ranks = ranks_of(world)
        return judge(plan, config, lambda other: plan_for(other, ranks, vocabulary), ranks.largest_node)

    return world.on_first_rank("judging the layout", judged)

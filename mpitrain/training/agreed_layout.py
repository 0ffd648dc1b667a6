"""Ask the planner once, on rank 0, for the layout of a run; all ranks take the answer."""

from mpitrain.comm.base.world import World
from mpitrain.config import Config, LoadedConfig
from mpitrain.data.tokenizer import Vocabulary
from mpitrain.plan.predict.gpu_share import GpuShare, may_have_gpus
from mpitrain.planner.layout_request import AnsweredLayout, LayoutRequest
from mpitrain.training.agreement import require_same_configuration


def agreed_layout(
    given: LoadedConfig, world: World, vocabulary: Vocabulary, look_at_gpus: bool = True
) -> AnsweredLayout:
    """Return the answer of rank 0 on all ranks, whose configurations have to be the same.

    look_at_gpus: torch may be loaded for that.

    Raises InputError or MeshError, alike on all ranks. It is collective.
    """
    config = given.config
    require_same_configuration(world, config)
    asks = config.run.layout != "default" and not config.memory.limit_gb and not config.run.machine
    gpu = gpu_share(config, world) if look_at_gpus and asks else None
    request = LayoutRequest(
        config, given.origins, world.size, world.num_nodes, world.node_ranks, vocabulary, gpu
    )
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

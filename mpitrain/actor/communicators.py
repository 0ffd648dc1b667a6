"""The communicators of a rank, as its plan says. No torch: a dry run has the same."""

from collections.abc import Callable

from mpitrain.cluster.limit import Limit
from mpitrain.comm.base.world import NULL_REPORTER, Communicator, StatusReporter
from mpitrain.comm.device.gpu_support import STAGED, Way
from mpitrain.comm.mesh import Mesh
from mpitrain.plan.plan import Plan


def build_mesh(
    plan: Plan,
    comm: Communicator,
    place: StatusReporter = NULL_REPORTER,
    way: Way = STAGED,
    on_thread: Callable[[], None] | None = None,
) -> Mesh:
    """Build every communicator this layout needs; the rest is for the mesh. Collective over `comm`."""
    axes = plan.axes
    keys = plan.config.comm
    options = {
        "transport": keys.transport,
        "timeout_s": Limit(keys.timeout_s).seconds,
        "progress": keys.progress,
        "place": place,
        "levels": keys.levels == "auto",
        "node_ranks": keys.node_ranks,
        "on_thread": on_thread,
    }
    return Mesh(comm, axes.grid, axes.of(comm.rank), axes.carried, **options, way=way)

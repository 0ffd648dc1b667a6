"""Point-to-point messages: right tensor whatever the order, and buffers that belong to the
operation until wait().
"""

from types import SimpleNamespace

import pytest
from conftest import agree

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.few_ranks]


@pytest.fixture
def mesh(world):
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    mesh = Mesh(world, Grid({"dp": 1, "pp": world.size}), {"links": range(world.size)}, timeout_s=30)
    yield mesh
    mesh.free()


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("length", [0, 1, 70_001])
def test_messages_are_matched_by_what_they_carry_not_by_their_order(mesh, synchronous, length):
    import torch

    from mpitrain.comm.links import Links

    links = Links(mesh["links"], mesh.size, 6, synchronous=synchronous)
    num = 6
    me = mesh.rank

    def payload(kind, stage, m):
        return torch.full((length,), float({"F": 0, "B": 1}[kind] * 1000 + stage * 10 + m))

    sends = []
    for m in (3, 0, 5, 1, 4, 2):
        if me + 1 < mesh.size:
            sends.append(links.send("F", me + 1, m, payload("F", me + 1, m), me + 1))
        if me > 0:
            sends.append(links.send("B", me - 1, m, payload("B", me - 1, m), me - 1))
    wrong = []
    for m in range(num):
        for kind, source, there in (("F", me - 1, me > 0), ("B", me + 1, me + 1 < mesh.size)):
            if there:
                found = links.receive(kind, me, m, torch.empty(length), source).wait()
                wrong += [] if torch.equal(found, payload(kind, me, m)) else [(kind, m)]
    for pending in sends:
        pending.wait()
    agree(mesh["links"].comm, not wrong, f"wrong {wrong}")


def test_tags_are_unique_within_a_step(mesh):
    from mpitrain.comm.links import Links

    links = Links(mesh["links"], 4, 7)
    tags = {links.tag(kind, stage, m) for kind in "FB" for stage in range(4) for m in range(7)}
    agree(mesh["links"].comm, len(tags) == 56 and max(tags) < mesh["links"].num_tags)


def test_too_many_tags_are_refused(mesh):
    from mpitrain.comm.links import Links
    from mpitrain.errors import MeshError

    def refused(axis, num_stages, num_microbatches):
        try:
            return not Links(axis, num_stages, num_microbatches)
        except MeshError as error:
            return "batch.micro" in str(error)

    enough = SimpleNamespace(num_tags=56)
    one_short = SimpleNamespace(num_tags=55)
    verdict = (
        refused(mesh["links"], 1 << 20, 1 << 20) and refused(one_short, 4, 7) and not refused(enough, 4, 7)
    )
    agree(mesh["links"].comm, verdict)


def test_a_message_that_never_comes_is_named(world):
    import torch

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.links import Links
    from mpitrain.comm.mesh import Mesh
    from mpitrain.errors import HangError

    mesh = Mesh(world, Grid({"pp": world.size}), {"links": range(world.size)}, timeout_s=0.3)
    links = Links(mesh["links"], world.size, 4)
    said = "F3 for stage 1 from rank 0"
    if world.rank == 1:
        pending = links.receive("F", 1, 3, torch.empty(4), 0)
        try:
            pending.wait()
        except HangError as error:
            said = str(error)
    agree(world, "F3 for stage 1 from rank 0" in said, said)
    if world.rank == 0:
        links.send("F", 1, 3, torch.zeros(4), 1).wait()
    mesh.progress.timeout_s = None
    mesh.free()


@pytest.mark.parametrize("looks", ["test", "waiting_on"])
def test_a_message_longer_than_was_due_is_named_whoever_finds_it(mesh, looks):
    """waiting_on() asks MPI, too, while somebody waits."""
    import torch

    from mpitrain.comm.links import Links
    from mpitrain.errors import MessageError

    axis = mesh["links"]
    said = ""
    links = Links(axis, mesh.size, 4)
    pending = links.receive("F", 1, 3, torch.empty(4), 0) if mesh.rank == 1 else None
    axis.comm.Barrier()  # it hasn't come when it is posted
    if mesh.rank == 0:
        links.send("F", 1, 3, torch.zeros(5), 1).wait()
    if mesh.rank == 1:
        mesh.progress.active.clear()  # nobody else looks
        try:
            while not pending.done:
                getattr(pending, looks)()
        except MessageError as error:
            said = str(error)
    found = "F3 for stage 1 from rank 0 of links: received a longer message than expected" in said
    agree(axis.comm, mesh.rank != 1 or found, said)


def test_of_several_messages_the_one_that_failed_says_why(world):
    """MPI says of several only that there is an error in a status."""
    from mpi4py import MPI

    from mpitrain.comm.base.mpi_errors import error_in_status

    statuses = [MPI.Status() for _ in range(3)]
    for status, code in zip(statuses, (MPI.SUCCESS, MPI.ERR_PENDING, MPI.ERR_TRUNCATE), strict=True):
        status.Set_error(code)
    several = MPI.Exception(MPI.ERR_IN_STATUS)
    agree(world, error_in_status(several, statuses).Get_error_class() == MPI.ERR_TRUNCATE, "of the third")
    agree(world, error_in_status(several, statuses[:2]) is several, "of none")
    other = MPI.Exception(MPI.ERR_OTHER)
    agree(world, error_in_status(other, statuses) is other, "of no message")


def test_what_mpi_cannot_do_for_all_ranks_says_what_it_was_for(world):
    from mpi4py import MPI

    from mpitrain.comm.base.world import NULL_REPORTER, World
    from mpitrain.errors import DeliveryError

    class Failing:
        def allgather(self, mine):
            raise MPI.Exception(MPI.ERR_OTHER)

    every = World(world, NULL_REPORTER)
    every.comm = Failing()
    with pytest.raises(DeliveryError, match=r"^DeliveryError: for all ranks: their sizes: "):
        every.all_gather("their sizes", 1)

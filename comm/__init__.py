"""The only code that touches MPI. To import it starts nothing: on a login node MPI may refuse to.

comm.base.world.connect() starts MPI, when the rank is guarded. Python runs this file before every
module of the package.

Rooms and files from the top down; each imports what stands below it only
(tests/unit/tree/test_layering.py).

standins/                       axes that send nothing: a rehearsal, and a replay of one rank alone
mesh                            all axes of a rank: builds, names and frees their communicators
collectives, links, prediction  what is started on an axis, and what that makes a rank send
axis                            one axis of a rank: chooses the transport of each operation
transports/                     protocol: what a transport is, and what it sees of an axis; messages
                                (Isend and Irecv), mpi_collectives, shared memory (window), two
                                levels over nodes
device/                         buffers of GPUs: whether MPI takes them, and the way through pinned
                                memory
tap                             listens to what is started
progress                        started operations, and the one place that moves them forward
meters/                         accounts of axes, clocks, measured link speed
base/                           the MPI library and its errors, the world, grids and nodes, buffers,
                                bytes on the wire
"""

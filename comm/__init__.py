"""The only code that touches MPI. To import it starts nothing.

comm.base.world.connect() starts MPI, when the rank is guarded.

What sends nothing never does: on a login node MPI may refuse to start. Python runs this file before
every module of the package.
"""

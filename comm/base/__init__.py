"""What lies below all axes: the MPI library, the world, grids and nodes, buffers, bytes on the wire."""

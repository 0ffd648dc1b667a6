"""What lies below all axes: the MPI library, its errors, the world, grids and nodes, buffers, bytes sent."""

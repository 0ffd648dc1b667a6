"""Buffers of GPUs: whether MPI takes them (CUDA-aware), and the way through pinned memory."""

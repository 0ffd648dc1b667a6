"""One file a family of pipeline schedules: GPipe, 1F1B, interleaved, zero bubble, DualPipe and others."""

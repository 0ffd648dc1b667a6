"""Layers that are spread over an axis. Each takes its axis; none looks one up.

communication    collectives of a block, whose backward is the adjoint one
async_tp         tensor parallelism whose messages travel while it computes
walk             a block: local segments and communications, walked there and back
microbatch       cut from a step's rows; what the items of a block know of one besides their input
device_clock     the clock of a GPU
context/         context parallelism: ring, all-gather, Ulysses
expert/          expert parallelism
zero/            ZeRO: weights, gradients and optimizer state in shards
"""

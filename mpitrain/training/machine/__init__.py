"""What a run finds out about the machine it is on, and settles by it.

device_placement, gpus    the GPU of a rank, who shares it, its share of the cores
between_nodes             when ZeRO-3 gathers weights, by the measured bandwidth between nodes
peak_flops                peak FLOP/s, for model FLOPs utilization (MFU)
compiler                  what torch.compile needs
determinism               the same bits each time on a GPU
"""

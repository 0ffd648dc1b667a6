"""What a plan will hold and send, before there is memory for it: `mpitrain memory`.

memory, memory_table                          all rows of a rank, and their table
process_memory                                what a process takes besides: libraries, kernels, holes
bucket_buffers, pool_sizes, arena             weights, gradients, and what is lent for a while
message_memory, staged_bytes, snapshot_bytes  what messages, their copies and a save hold
rounded_copies                                copies in 16 bits, of what is summed
node_memory, memory_limit, gpu_share          whether a node, a GPU or memory.limit_gb has room
step_time/                                    how long a step takes
model_parts                                   parameters and FLOPs of a model by part
promises, speed_costs                         what other settings would hold
cheapest_change                               which change of a setting fits
link_choices                                  what follows from measured bandwidth
"""

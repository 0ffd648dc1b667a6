"""What a plan will hold and send, before there is memory for it: `mpitrain memory`.

memory, memory_table                          all rows of a rank, and their table
bucket_buffers, pool_sizes, arena             weights, gradients, and what is lent for a while
message_memory, staged_bytes, snapshot_bytes  what messages, their copies and a save hold
node_memory                                   whether a node, or a GPU, has room
alternatives                                  what other settings would hold
link_choices                                  what follows from measured bandwidth
"""

"""ZeRO (FSDP, HSDP): weights, gradients and optimizer state of a bucket in shards, over the shard axis.

shards                     the shard of a bucket: all-gather of weights, reduce-scatter of gradients
pool                       the memory of gathered weights and unreduced gradients
parameters                 a parameter as the model sees it: a view into its bucket
tree_accumulation          gradient accumulation in one fixed tree, for the same bits in every layout
initial, inverse_normal    initial weights that know nothing of the layout
"""

"""How a model is divided: over stages, ranks, buckets and positions. Integers and names.

stages, stage_balance   which layers each pipeline stage has
sequence                which positions each rank of the cp axis holds, and which keys its queries see
domains                 over which axes the optimizer state of a bucket is divided
buckets                 which parameters are stored, reduced and gathered (prefetch) together
batch_division          which microbatches each data rank computes, and the tree of their sums
gradient_accumulation   which instructions add to a gradient, and when it is complete
"""

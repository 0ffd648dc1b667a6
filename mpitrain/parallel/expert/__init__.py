"""Expert parallelism: tokens travel to their experts and back, dropless or up to a capacity factor.

rounds, packing            which rows go when; rows as bytes
exchange                   one all-to-all a direction and round
crossings, hierarchical    by nodes first: each token crosses to a node once
"""

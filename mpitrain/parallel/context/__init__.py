"""Context parallelism: attention over a sequence that is spread over ranks.

attention           which of them is used
ring                ring attention: keys and values go round
online_softmax      the mask of a tile of keys; results of tiles are added up as keys come by
all_gather          keys and values are gathered
ulysses             all-to-all from positions to heads and back (DeepSpeed-Ulysses)

What is computed of a tile of keys, and in a sliding window, is in mpitrain/kernels/.
"""

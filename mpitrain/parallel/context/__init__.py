"""Context parallelism: attention over a sequence that is spread over ranks.

attention           which of them is used
ring, accumulate    ring attention: keys and values go round, results are added up
all_gather          keys and values are gathered
ulysses             all-to-all from positions to heads and back (DeepSpeed-Ulysses)

What is computed of a tile of keys, and in a sliding window, is in mpitrain/kernels/.
"""

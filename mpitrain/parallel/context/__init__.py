"""Context parallelism: attention over a sequence that is spread over ranks.

attention          which of them is used
ring, accumulate   ring attention: keys and values go round, results are added up
all_gather         keys and values are gathered
ulysses            all-to-all from positions to heads and back (DeepSpeed-Ulysses)
window             a sliding window needs some neighbours only
by_blocks, by_onednn, flash    attention to a tile of keys: on a CPU in 16 and 32 bits, on a GPU
"""

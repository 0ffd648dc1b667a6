"""Context parallelism: attention over a sequence that is spread over ranks.

attention                                  which of them is used
ring, accumulate                           ring attention: keys and values go round, results are added up
all_gather                                 keys and values are gathered
ulysses                                    all-to-all from positions to heads and back (DeepSpeed-Ulysses)
window                                     a sliding window needs some neighbours only
attention_tiles                            attention to a tile of keys, by the kernel of the device
attention_cpu_16bit, attention_cpu_fp32    such kernels for a CPU
attention_products                         matrix products, on any device; soft-capped scores
"""

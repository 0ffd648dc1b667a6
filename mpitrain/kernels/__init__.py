"""Pure computation on tensors: nothing is sent, no layer and no parameter is known.

attention                                  what a layer asks of attention; choose() says which kernel
attention_tiles                            attention to a tile of keys, with the log-sum-exp
attention_window                           in a sliding window, with sinks
attention_documents, document_spans        of the documents of a row by themselves; where they lie
attention_one_query                        of the one query of a token that is generated
attention_cpu_16bit, attention_cpu_fp32    attention kernels for a CPU
attention_torch                            by torch's scaled_dot_product_attention
attention_products                         by matrix products: on any device; soft caps, dropout
dropout                                    dropout whose masks are a function of where an element is
functions, compiled                        norms, gated product, rotary positions, cross-entropy; the same
                                           fused by torch.compile
products, grouped, fp8                     products of matrices, of groups of rows (experts), in fp8
activation_functions                       of feed-forwards, gated or not, and of experts
precision                                  mixed precision: types that a run computes, sums and sends with
processor                                  what a CPU multiplies slowly
engine                                     gradients by torch's autograd engine
streams, pinned                            queues of a device's work; pinned memory of the host
"""

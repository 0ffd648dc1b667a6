"""What computes a model: autograd graphs of local segments, between communications.

families/                                      a model is a list of layers
layers/                                        what a layer declares: integers, no torch
blocks, build_context                          builds the layers of a stage, over the axes of this rank
attention, latent_attention, rotary            attention: projections, positions
attention_functions                            attention as autograd functions, by each kernel
feed_forward                                   the feed-forward, gated or without a gate
linear                                         products with weights, and their gradients
regather                                       inputs that are gathered again for the backward
width_norm                                     RMSNorm of queries and keys over all heads together
experts, router                                a mixture of experts
embedding_and_head, multi_token                the ends of a model; multi-token prediction
residual_dropout                               dropout of the residual stream
segment                                        forward and backward of one local segment
recompute, selective                           activation recomputation (activation checkpointing)
offload                                        activations on the host
kv_history                                     keys and values of earlier segments (Seq1F1B)
kv_cache                                       keys and values of a text that is generated
"""

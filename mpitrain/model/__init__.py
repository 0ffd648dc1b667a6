"""What computes a model: autograd graphs of local segments, between communications.

families/      a model is a list of layers           layers/    what a layer declares: integers, no
                                                                torch
blocks, site   builds the layers of a stage, over the axes of this rank
attention, latent_attention, window, rotary          feed_forward, gates, linear, fp8
experts, router, grouped                             embedding_and_head
multi_token                                          multi-token prediction
segment, engine                                      forward and backward of one local segment
recompute, selective                                 activation recomputation (activation
                                                     checkpointing)
offload                                              activations on the host
sequence_history                                     keys and values of earlier segments (Seq1F1B)
"""

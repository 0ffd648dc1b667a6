"""What a layer declares: parameters, FLOPs, bytes saved for its backward, what it sends. Integers, no torch.

    embedding_and_head  token embedding, learned positions; last norm, logits, cross-entropy
    attention, rope     causal attention with grouped queries, sliding window, sinks, soft cap; rotary
                        positions
    latent_attention    multi-head latent attention (DeepSeek)
    feed_forward        the feed-forward, gated (SwiGLU, or another activation) or without a gate
    post_norm         a norm after any of these (post-norm)
    experts             a mixture of experts: router, experts, shared experts
    multi_token         heads that predict further tokens

What computes a layer has the same file name in mpitrain/model/. Layer in
mpitrain/plan/declared/layer.py is the protocol.
"""

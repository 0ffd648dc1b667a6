"""Optimizers: what becomes of summed gradients. One file an optimizer; each owns a shard of its state.

optimizers/                adamw, sgd, muon: the update, with decoupled weight decay
optimizer, protocol        build the one that the configuration names; what the actor asks of it
elementwise                what those have in common that look at each number by itself
matrices, newton_schulz    whole matrices out of shards, and their orthogonal factor, for muon
moments                    the optimizer state, in fp32, fp64 or bf16
stochastic_rounding        of bf16 moments
norm                       the global gradient norm, for gradient clipping
noise_scale                the gradient noise scale, from norms of shards of a batch
rates                      learning rate schedules
loss_scale                 loss scaling for fp16 gradients
offload                    master weights and moments in host memory (ZeRO-Offload)
expert_bias                what isn't trained: the bias of each expert, frozen weights
"""

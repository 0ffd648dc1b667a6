"""What a configuration means, in integers: one plan, which everything else follows. No torch, no MPI.

resolve, attention, experts,          fill in what was left open, refuse what doesn't fit together
stage_balance
family, optimizers                    what a family of models declares, and what an optimiser does
identity                              which keys make two runs the same computation
plan                                  the plan of a run
axes, domains, sequence, stages       who shares what: ranks, optimizer state, positions, layers
parameters, buckets                   what is stored and gathered (prefetch) together
gradient_accumulation                 which instructions add to a gradient, and when it is complete
program, pipeline_table               the instructions of every rank, and their proof
traffic, dispatch, routing            what is sent
link_choices                          what follows from measured bandwidth
memory, memory_table, activations,    what is held: `mpitrain memory`
activation_peak, transients, arena
idle, alternatives                    settings that would do nothing, or hold more
"""

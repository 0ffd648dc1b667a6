"""What a configuration means, in integers: one plan, which everything else follows. No torch, no MPI.

resolve, attention, experts, balance    fill in what was left open, refuse what doesn't fit together
plan                                    the plan of a run
axes, domains, sequence, stages         who shares what: ranks, optimizer state, positions, layers
parameters, buckets, gradient_uses      what is stored, reduced (gradient accumulation) and gathered
                                        (prefetch)
program, table                          the instructions of every rank, and their proof
traffic, exchange, dispatch, routing    what is sent
memory, memory_table, peak, activations, transients, arena, ...    what is held: `mpitrain memory`
idle, alternatives                      settings that would do nothing, or hold more
"""

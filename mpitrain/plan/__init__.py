"""What a configuration means, in integers: one plan, which everything else follows. No torch, no MPI.

settings/     fill in what was left open, refuse what doesn't fit together
declared/     what layers, families and optimisers say of themselves
division/     stages, positions, domains of optimizer state, buckets
activations/  what is kept for the backward, and what one computation needs
axes          which ranks share an axis, and what is started on it
program       the instructions of every rank, and their proof
routing, routing_file  which experts tokens were sent to: recorded, replayed, read
plan          the plan of a run
predict/      memory and traffic of a plan
"""

"""How long a training step takes, before it runs: integers and floats, no torch, no MPI.

machine.py             what a machine can do, from a file of jobs/machines/ or the user's own
step_model.py          a model by its own layers, blocks that are alike as one kind
layout.py              which layouts can exist, of those that no configuration has
resolved_layout.py     layout of a resolved configuration
expert_load.py         rows of the rank of ep whose experts have most
tiles.py               what share of its rate a product of some shape reaches
compute.py             seconds of products, attention and passes
network.py             seconds of collectives over the links of a machine
stage_seconds.py       seconds of a stage's forward and backward
optimizer_seconds.py   an optimiser's passes over memory, products with whole matrices, and messages
step.py                a step: the pipeline played by the schedules' simulator, data ranks, the
                       update
predicted_timeline.py  the played pipeline, with what is exposed in it
footprint.py           bytes of a rank by formulas
advice.py              rules of the field that a layout breaks
"""

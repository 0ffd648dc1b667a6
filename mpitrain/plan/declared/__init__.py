"""What layers, families and optimisers say of themselves: shapes, bytes, FLOPs, keys. Integers and names.

parameters      a parameter, and the box of it that a rank holds
resolved        types of a resolved configuration: the keys that always have a value
layer           what a layer declares: parameters, FLOPs, bytes kept, what it sends, its work in a step
work            what a layer computes, passes over memory, sends and keeps, for predictions of a step
expert_work     the same of experts
step_layout     how a model is divided over ranks, as predictions of a step take it
probabilities   attention's probabilities in bf16 on a CPU
expert_rows     how many rows of an expert are multiplied at once in 16 bits
dropout_sites   which dropouts there are, and what their masks take
family          a family of models: layers, keys with their defaults, presets
optimizers      an optimiser: its keys, its moments (optimizer state), whether it needs whole matrices
traffic         what is started, before it is: operation, axis, bytes
layer_traffic   what the items of a layer send over tp and cp
hugging_face    fields of config.json as keys of ours, and names of weights
published       public models by name, each with its source
formatting      numbers and tables as text
screen          text laid out for the width of the user's terminal
"""

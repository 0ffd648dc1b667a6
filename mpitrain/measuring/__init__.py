"""A machine, measured by the ranks that are on it.

measured_machine   all figures of a machine's file
device             products, attention, memory and launches of a processor
node_links         links inside a node and between nodes
storage            write bandwidth of a folder for checkpoints
measured_rounds    rounds until the best values agree; what shows that others had the cores
environment        MPI, launcher, nodes, GPUs and bandwidth, as lines of a report
"""

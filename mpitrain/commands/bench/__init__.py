"""`mpitrain bench machine`: the file of a machine (jobs/machines/), measured.

bench_machine    the command: all ranks measure, rank 0 prints and writes
measured_rounds  rounds until the best values agree, and what shows a disturbed machine
device           what a rank's device does: products, attention, passes over memory, launches
storage          what a node writes to the file system of checkpoints
node_links       what the ranks of a node, and nodes, send each other
"""

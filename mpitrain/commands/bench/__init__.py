"""`mpitrain bench machine`: the file of a machine (jobs/machines/), measured.

machine.py  the command: all ranks measure, rank 0 prints and writes
device.py   what a rank's device does: products, attention, passes over memory, launches
links.py    what the ranks of a node, and nodes, send each other
"""

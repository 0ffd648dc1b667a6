"""The dry run of a layout: all ranks, real communicators and real messages, and nothing computed.

Its command is commands/dry_run.

recipes      another process rehearses each rank, the only one that loads torch
rehearsal    what a rank would start in a step, by the actor itself on axes that send nothing
uncomputed   its tensors, which have no memory: shapes only
silent_walk  a rank that computes nothing walks its program, with real operations
asleep, asleep_on_machine  how long a rank sleeps for an instruction, and as is predicted
signed       messages that are checked as they come
"""

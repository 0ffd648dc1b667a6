"""The dry run of a layout: all ranks, real communicators and real messages, and nothing computed.

dry_run      all of it: start, recipes, communicators, steps, report
recipes      another process rehearses each rank (actor/rehearsal.py), the only one that loads torch
silent_walk  a rank that computes nothing walks its program, with real operations
asleep, asleep_on_machine  how long a rank sleeps for an instruction, and as is predicted
signed       messages that are checked as they come
"""

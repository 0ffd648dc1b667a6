"""Pipeline schedules as tables: plain Python, no torch, no MPI.

gpipe, one_f_one_b, zero_bubble,    orders drawn in docstrings, one file a family
interleaved, zbv, dualpipe, seq1f1b
zb_auto, zbv_auto                   orders searched for, by measured times and a memory limit
v_half, v_shape                     orders built from a block: the way of a microbatch through a V
catalog, options                    name -> table: what users type, and what they can choose
limits, search_progress             how large it may be, and how far a search for it is
user_table, csv_table, table_tokens file -> table: users' own, from text, CSV or PyTorch's
actions, table                      one instruction; a whole table; and their text form
lower                               table -> every rank's program: what follows, and the update
messages                            sends and receives
reductions, sums                    gradients are reduced, and summed over other axes first
residency                           parameters come and go: prefetch and reshard of ZeRO-3
check, rules, bucket_rules          prove a set of programs
deadlock                            prove that no rank waits for ever
needs, simulate, transfers          what waits for what, and when it starts
timeline, draw                      how it looks
"""

"""Pipeline schedules as tables: plain Python, no torch, no MPI.

Rooms and files from the top down; each imports what stands below it only
(tests/unit/tree/test_layering.py).

time_and_memory, auto_choice      time against memory of all schedules; `auto`: the shortest that fits
played                            a table with its proof, its timeline and its memory
catalog                           name -> table: what users type; finds the files of families/
formats/                          file -> table: users' own, from text, CSV or PyTorch's; and the
                                  field's notation
proof/                            prove a set of programs: no deadlock, every message met, every
                                  gradient reduced once
play/                             simulate a timeline, with times assumed or measured; draw it; times of
                                  stages that differ (stage_work)
lowering/                         table -> every rank's program: messages, gradient reductions, sums
                                  over other axes, prefetch and reshard of ZeRO-3; and what waits
                                  for what
families/                         gpipe, one_f_one_b, zero_bubble, interleaved, v_1f1b, zbv, dualpipe,
                                  seq1f1b: orders drawn in docstrings; zb_auto, zbv_auto: the
                                  papers' searches; searched: the shortest found for each placement;
                                  v_half: built from a block (v_shape)
search/                           the search for an order under a memory limit: the problem and its
                                  lower bound, a play by urgencies, their improvement, the polish
family                            what a file in families/ defines: ScheduleFamily
table                             a whole table, and its text form
pairs                             computations that run together
limits, options, search_progress  how large it may be, what can be chosen, how far a search is
actions                           one instruction of a program, and its text form
"""

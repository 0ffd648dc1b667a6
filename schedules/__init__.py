"""Pipeline schedules as tables: plain Python, no torch, no MPI.

    gpipe, one_f_one_b, forward_only   compute order of one stage       one file per family
    catalog                            name -> table                    what users type
    actions, table                     one instruction; a whole table   and their text form
    lower                              table -> every rank's program    messages, reductions, update
    check, rules, deadlock             prove a set of programs
    needs, simulate, draw              what waits for what, when it starts, how it looks
"""

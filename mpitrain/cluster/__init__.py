"""What a run needs of the machines it is on: who started it, where its ranks are, who ends it, and the directory it leaves.

    guard.py      around each rank: its place, signals, and an end with one report
    watchdog.py   one small process a node: limits, deaths, and the report; first_watch.py until it is there
    board.py      memory that the ranks of a node and their watchdog share: where is each of them
    lock.py       one run in a run directory
"""

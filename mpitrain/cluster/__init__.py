"""What a run needs of the machines it is on.

Who started it, where its ranks are, who ends it, and the directory it leaves.

guard.py      around each rank: its place, signals, and an end with one report
watchdog.py   one small process a node: limits, deaths, and the report
board.py      memory that a rank and the watchdog share: where it is
finding.py    how a rank finds the watchdog of its node
console.py    where a watchdog speaks; launcher_stderr.py has it speak where nothing is lost
lock.py       one run in a run directory
"""

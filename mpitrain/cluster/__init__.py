"""What a run needs of the machines it is on.

allocation, launch, limit     when this job ends; who started it; how long a wait may be
entry, std_streams            what a process does first; output that it survives
team, progress_bar            one process, or all ranks, at work on files; how far they are
guard                         around each rank: an end with one report
leave_requests                why a rank has to leave: signals, the end of its time
listening_thread              of a rank: hears signals and the watchdog, watches the limit without one
watchdog_client               a rank's end of its connection to the watchdog
watchdog                      one small process a node: limits, deaths, and the report
watchdog_connections          whom it hears: ranks, lifelines, the launcher
watchdog_messages, activity   what ranks and watchdogs tell each other; whether a rank is at work
status_board                  memory that a rank and the watchdog share: where the rank is
watchdog_rendezvous, nodes    how a rank finds the watchdog of its node; watchdogs of other nodes
hang_analysis                 why a run hangs: who is behind, and who waits for whom
console                       where a watchdog speaks, so that nothing is lost
processes, launcher_process   what the system knows of a process; the launcher above the ranks
rundir, lock, logs            the directory of a run; one run in it; a log of each rank
preflight, code_identity      space, clocks and bandwidth before the first step; the same code on all ranks
unhealthy_nodes               nodes that err or are slow, which the next start leaves out
shared_memory, resident       memory of a node
heap, threads, crowding       memory that was freed; the cores of a node and who shares them
"""

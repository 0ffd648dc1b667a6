"""What a rank and the watchdog of its node tell each other, by the first bytes of a message."""

GREETING = b"here"  # the first that a rank sends, with its slot and its lifeline
FAILED, GAVE_UP = b"F", b"W"  # with code and text
ASKED = b"A"  # with the signal's number, and what is to be said of it, once
LEAVES = b"L"  # with 0 and text: all ranks leave in order, because they were asked to
# so many ranks, all of this node, are here; with a stderr, the Meeting, and the hub's door
MEET = b"M"
SPARES = b"S"  # with 0: a rank that is gone is replaced by a spare; it doesn't end the job
BYE = b"B"  # it has another watchdog now
# Answers to GREETING, with the watchdog's process, and to MEET; all else is the job's exit code
READY, REFUSED = b"ready", b"refused"

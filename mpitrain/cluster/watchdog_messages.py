"""What a rank and the watchdog of its node tell each other, by the first bytes of a message."""

GREETING = b"here"  # the first that a rank sends, with its slot and its lifeline
# with code and text
FAILED = b"F"
GAVE_UP = b"W"
# with the number of the signal that asks the rank to leave, and what is to be said of it, once
ASKED = b"A"
LEAVES = b"L"  # with 0 and text: all ranks leave in order, because they were asked to
# all ranks of this node are here, so many; with a stderr, the Meeting, and the door if this node is
# the hub
MEET = b"M"
SPARES = b"S"  # with 0: a rank that is gone is replaced by a spare; it doesn't end the job
BYE = b"B"  # it has another watchdog now
# Answers to GREETING, with the process of the watchdog, and to MEET. What else a rank is sent is
# the exit code to end the job with.
READY, REFUSED = b"ready", b"refused"

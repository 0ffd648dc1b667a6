"""What mpirun starts in place of a rank, which tests/support/preload.py forks; it ends as that does.

    python -S -E rank_proxy.py SOCKET mpitrain run ...

Thousands are started: it imports what Python has in C, which takes 25 ms less each time.
"""

import _signal
import _socket
import marshal
import os
import sys

PASSED_ON = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGUSR1, _signal.SIGUSR2)


def stand_for(address: str, command: list[str]) -> None:
    """Have `command` run by a fork of the one that listens at `address`, and end as it does."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    connection.connect("\0" + address)
    numbers = [
        number
        for number in map(int, os.listdir("/proc/self/fd"))
        if number != connection.fileno() and _is_open(number)
    ]
    for number in PASSED_ON:
        _signal.signal(number, lambda which, _: connection.send(bytes([which])))
    request = {"command": command, "folder": os.getcwd(), "environment": dict(os.environ), "numbers": numbers}
    descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
    sent = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)]
    connection.sendmsg([marshal.dumps(request)], sent)
    # What the rank writes to stays open here, too, until this ends: a launcher sees both at once,
    # as of a rank that is no fork.
    ended = int(connection.recv(16) or 1)
    if ended < 0:
        if ended != -_signal.SIGKILL:
            _signal.signal(-ended, _signal.SIG_DFL)
        os.kill(os.getpid(), -ended)
    os._exit(ended)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:  # the one with which the folder was read
        return False
    return True


stand_for(sys.argv[1], sys.argv[2:])

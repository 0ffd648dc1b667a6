"""Run a command that may not read other processes' memory, as in some containers.

python without_ptrace.py mpirun -n 2 mpitrain run ...

A filter of system calls (seccomp), as containers have one, answers process_vm_readv with EPERM. x86-64 only.
"""

import ctypes
import errno
import os
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
X86_64, PROCESS_VM_READV = 0xC000003E, 310
LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERROR = 0x7FFF0000, 0x00050000
FILTER = [  # code, steps on if true, steps on if not, value
    (LOAD, 0, 0, 4),  # the architecture
    (IF_EQUAL, 0, 3, X86_64),
    (LOAD, 0, 0, 0),  # the call
    (IF_EQUAL, 0, 1, PROCESS_VM_READV),
    (RETURN, 0, 0, ERROR | errno.EPERM),
    (RETURN, 0, 0, ALLOW),
]


class Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def forbid() -> None:
    """Have the kernel refuse the call to this process and all that it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in FILTER))
    program = Program(len(FILTER), ctypes.addressof(code))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)
    ):
        sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    forbid()
    os.execvp(sys.argv[1], sys.argv[1:])

"""The checksum that HDF5 keeps of its own structures.

Bob Jenkins' lookup3, hashlittle() with initial value 0.

http://burtleburtle.net/bob/c/lookup3.c (public domain)
"""

import struct

MASK = 0xFFFFFFFF


def lookup3(data: bytes) -> int:
    a = b = c = 0xDEADBEEF + len(data) & MASK
    if not data:
        return c
    whole = (len(data) - 1) // 12 * 12  # the last 1 to 12 bytes are mixed in another way
    words = struct.unpack(f"<{whole // 4 + 3}I", data + bytes(whole + 12 - len(data)))
    for i in range(0, whole // 4, 3):
        a = a + words[i] & MASK
        b = b + words[i + 1] & MASK
        c = c + words[i + 2] & MASK
        a = (a - c & MASK) ^ (c << 4 & MASK | c >> 28)
        c = c + b & MASK
        b = (b - a & MASK) ^ (a << 6 & MASK | a >> 26)
        a = a + c & MASK
        c = (c - b & MASK) ^ (b << 8 & MASK | b >> 24)
        b = b + a & MASK
        a = (a - c & MASK) ^ (c << 16 & MASK | c >> 16)
        c = c + b & MASK
        b = (b - a & MASK) ^ (a << 19 & MASK | a >> 13)
        a = a + c & MASK
        c = (c - b & MASK) ^ (b << 4 & MASK | b >> 28)
        b = b + a & MASK
    a = a + words[-3] & MASK
    b = b + words[-2] & MASK
    c = c + words[-1] & MASK
    c = (c ^ b) - (b << 14 & MASK | b >> 18) & MASK
    a = (a ^ c) - (c << 11 & MASK | c >> 21) & MASK
    b = (b ^ a) - (a << 25 & MASK | a >> 7) & MASK
    c = (c ^ b) - (b << 16 & MASK | b >> 16) & MASK
    a = (a ^ c) - (c << 4 & MASK | c >> 28) & MASK
    b = (b ^ a) - (a << 14 & MASK | a >> 18) & MASK
    return (c ^ b) - (b << 24 & MASK | b >> 8) & MASK

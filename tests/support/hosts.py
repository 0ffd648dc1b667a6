"""Two hosts on one machine: network namespaces joined by a cable of a given rate, which can be cut or slowed.

Each has half of the cores, and a /dev/shm of its own. Needs root, ip, tc and taskset.

    with two_hosts("1gbit") as hosts:
        command = hosts.mpirun(2, MPITRAIN, "run", ...)      two ranks on each
        hosts.cut(), hosts.mend()  or  hosts.slow("100mbit")

Namespaces have a name of this process: several tests don't meet.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from launch import MPIRUN

ADDRESSES = "10.79.0.1", "10.79.0.2"
CHOSEN = os.environ.get("MPITRAIN_NETNS") == "1"
LAUNCH = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
[ $host = {first} ] && name={names[0]} memory={memory[0]} cores={cores[0]}
[ $host = {first} ] || name={names[1]} memory={memory[1]} cores={cores[1]}
exec ip netns exec $name taskset --cpu-list $cores bash -c "mount --bind $memory /dev/shm && $*"
"""


class Hosts:
    """The two hosts. folder: for the launcher's script, and for `memory`, what each has as /dev/shm."""

    def __init__(self, folder: Path):
        self.names = [f"mpt{os.getpid()}{which}" for which in "ab"]
        self.cables = [f"v{os.getpid()}{which}" for which in "ab"]
        self.memory = [folder / f"memory-{which}" for which in "ab"]
        for path in self.memory:
            path.mkdir()
        self._script = folder / "launch.sh"
        self._script.write_text(
            LAUNCH.format(first=ADDRESSES[0], names=self.names, memory=self.memory, cores=_halves())
        )
        self._script.chmod(0o755)

    def up(self, rate: str) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for name, cable, address in zip(self.names, self.cables, ADDRESSES):
            _run("ip", "link", "set", cable, "netns", name)
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _run("ip", "-n", name, "link", "set", cable, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            self._rate("add", name, cable, rate)

    def down(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def slow(self, rate: str) -> None:
        """Change the rate of the cable, both ways."""
        for name, cable in zip(self.names, self.cables):
            self._rate("change", name, cable, rate)

    def cut(self) -> None:
        """Pull the cable out at the second host; the first one's has no carrier then."""
        _run("ip", "-n", self.names[1], "link", "set", self.cables[1], "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        _run("ip", "-n", self.names[1], "link", "set", self.cables[1], "up")

    def on_first(self, *command: str) -> list[str]:
        """Return the command line that starts a command on the first host."""
        bound = f'mount --bind {self.memory[0]} /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.names[0], "bash", "-c", bound, "bash", *command]

    def mpirun(self, each: int, *command: str) -> list[str]:
        """Return the command line that starts `each` ranks on either host."""
        return self.on_first(*self.launcher(each, ADDRESSES), *command)

    def launcher(self, each: int, addresses: Sequence[str]) -> list[str]:
        """Return the words before a command that is started on the first host, for some of the hosts."""
        launcher = "-launcher", "ssh", "-launcher-exec", str(self._script)
        hosts = "-hosts", ",".join(f"{address}:{each}" for address in addresses)
        return [MPIRUN, *launcher, *hosts, "-n", str(len(addresses) * each)]

    def _rate(self, verb: str, name: str, cable: str, rate: str) -> None:
        # a larger burst is a message that takes no time
        shape = "root", "tbf", "rate", rate, "burst", "128kb", "latency", "50ms"
        _run("ip", "netns", "exec", name, "tc", "qdisc", verb, "dev", cable, *shape)


@contextmanager
def two_hosts(folder: Path, rate: str = "1gbit") -> Iterator[Hosts]:
    """Have two hosts for a while."""
    assert os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"), "needs root, ip and tc"
    hosts = Hosts(folder)
    try:
        hosts.up(rate)
        yield hosts
    finally:
        hosts.down()


def _halves() -> list[str]:
    """Return the cores of each host, which has one at least."""
    cores = sorted(os.sched_getaffinity(0))
    middle = len(cores) // 2
    return [",".join(map(str, each)) for each in (cores[: middle or 1], cores[middle:])]


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"

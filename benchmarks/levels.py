"""Collectives over two hosts in one level and in two (comm/transports/levels.py).

times, and the bytes that leave a host.

    python benchmarks/levels.py --namespaces mtA,mtB --addresses 10.78.0.1,10.78.0.2  as root: two
        network namespaces as hosts
    mpirun -n 8 python benchmarks/levels.py --ranks                                   on the hosts
        of a cluster

The first starts 4 ranks in each namespace (joined by a link of 1 Gbit/s: `ip link add vA type veth
peer name vB`, `tc qdisc add dev vA root tbf rate 1gbit burst 1mb latency 50ms`) with MPICH's
mpirun, which takes them for two nodes. Ways take turns, times are medians of the slowest rank.
Bytes are those that leave the first host: by its interfaces, headers included, and by the accounts
of the far axes.

%s
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MEASURED = """Two hosts of 4 ranks on two cores, 1 Gbit/s, MPICH 5.0.2:

    operation       one level: ms  MB over the link  two levels: ms  MB over the link  MB counted  ratio
    all_reduce                284              33.6              88              8.41        8.39    3.2
    reduce_scatter            138              16.8              46              4.21        4.19    3.0
    all_gather                135              16.8              35              4.21        4.19    3.8
    broadcast                  68               8.4              74              8.40        8.39    0.9
"""
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
MIB = 8


def sent_by_link() -> int:
    """Return the bytes that this host's interfaces have sent, without the one to itself."""
    folders = [folder for folder in Path("/sys/class/net").iterdir() if folder.name != "lo"]
    return sum(int((folder / "statistics/tx_bytes").read_text()) for folder in folders)


def started(operation: str, axis, x, out):
    """Start an operation on buffers that are there."""
    from mpitrain.comm import collectives

    if operation == "all_reduce":
        return collectives.all_reduce(x, axis)
    if operation == "reduce_scatter":
        return collectives.reduce_scatter(x, axis, out[: len(x) // axis.size])
    if operation == "all_gather":
        share = len(x) // axis.size
        return collectives.all_gather(x[axis.rank * share :][:share], axis, out)
    return collectives.broadcast(x, axis)


def ranks(repeats: int) -> None:
    """Measure, on ranks that mpirun started."""
    import numpy as np

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.base.world import NULL_REPORTER, connect, finalize
    from mpitrain.comm.collectives import barrier
    from mpitrain.comm.mesh import Mesh

    world = connect(NULL_REPORTER)
    meshes = {
        way: Mesh(world.comm, Grid({"dp": world.size}), timeout_s=120, levels=way == "two")
        for way in ("one", "two")
    }
    rows = [(name, MIB << 20) for name in OPERATIONS]
    if world.rank == 0:
        print(f"{world.size} ranks on {world.num_nodes} nodes, {meshes['two']['dp'].nodes}")
        print(
            f"{'operation':>16} {'KB':>8} | one level: ms, MB over the link | two levels: ms, MB over the "
            "link, MB counted | ratio"
        )
    for name, num_bytes in rows:
        x = np.ones(num_bytes // 4, np.float32)
        out = np.zeros(num_bytes // 4, np.float32)
        times = {"one": [], "two": []}
        links = {"one": [], "two": []}
        counted = 0
        for _ in range(repeats):
            for way, mesh in meshes.items():
                axis = mesh["dp"]
                barrier(axis).wait()
                time.sleep(0.01)
                link = sent_by_link()
                far = axis.far.account.num_bytes if axis.far else 0
                barrier(axis).wait()  # nobody begins before all have looked
                begin = time.perf_counter()
                started(name, axis, x, out).wait()
                times[way].append(max(world.comm.allgather(time.perf_counter() - begin)))
                barrier(axis).wait()
                links[way].append(sent_by_link() - link)
                if axis.far:
                    counted = sum(world.node.allgather(axis.far.account.num_bytes - far))
        ms, mb = (
            {way: statistics.median(found[way]) / unit for way in found}
            for found, unit in ((times, 1e-3), (links, 1e6))
        )
        if world.rank == 0:
            print(
                f"{name:>16} {num_bytes / 1e3:8.1f} | {ms['one']:10.2f} {mb['one']:10.3f} | "
                f"{ms['two']:10.2f} {mb['two']:10.3f} {counted / 1e6:10.3f} | {ms['one'] / ms['two']:5.2f}",
                flush=True,
            )
    for mesh in meshes.values():
        mesh.free()
    finalize()


def start(namespaces: list[str], addresses: list[str], repeats: int) -> int:
    """Start 4 ranks in each namespace."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as script:
        cases = "\n".join(
            f'[ "$h" = {address} ] && ns={name}' for name, address in zip(namespaces, addresses)
        )
        script.write(
            f"#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nh=$1; shift\n{cases}\nexec ip netns exec "
            '$ns bash -c "$*"\n'
        )
    os.chmod(script.name, 0o755)
    hosts = ",".join(f"{address}:4" for address in addresses)
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    command = [
        mpirun,
        "-launcher",
        "ssh",
        "-launcher-exec",
        script.name,
        "-hosts",
        hosts,
        "-n",
        str(4 * len(addresses)),
    ]
    polite = {
        "UCX_TLS": "tcp,self",
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
        "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "true",
    }
    own = [sys.executable, __file__, "--ranks", "--repeats", str(repeats)]
    try:
        done = subprocess.run(
            ["ip", "netns", "exec", namespaces[0], *command, *own], env={**os.environ, **polite}, check=False
        )
    finally:
        os.unlink(script.name)
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__ % MEASURED, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", action="store_true", help="this is a rank")
    parser.add_argument("--namespaces", default="mtA,mtB")
    parser.add_argument("--addresses", default="10.78.0.1,10.78.0.2")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    if asked.ranks:
        ranks(asked.repeats)
        return 0
    return start(asked.namespaces.split(","), asked.addresses.split(","), asked.repeats)


if __name__ == "__main__":
    sys.exit(main())

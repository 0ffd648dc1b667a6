"""Count what the busiest link of a network carries, and compute times of an all-reduce.

    python docs/course/measuring/networks.py

Prints a JSON object. `links`: [pattern, network, bytes over the busiest link as a share of the
buffer, mean number of links of a message]. `times`: [bytes, algorithm, microseconds]. Nothing is
measured: routes are counted, and times follow from the constants below.
"""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

NODES = 16
SIDE = 4  # of the torus; nodes of a leaf switch in the fat tree
Link = tuple[object, object]
Message = tuple[int, int, float]  # from, to, share of the buffer

# Of a hop inside a node and between nodes: seconds, and bytes a second. NCCL's table of ring latencies
# (src/graph/tuning.cc, Simple protocol) for H100; NVLink 4 has 450 GB/s a direction, NDR InfiniBand 50.
NEAR = (3.4e-6, 450e9)
FAR = (14e-6, 50e9)
RANKS = 64
NEIGHBOURS = 8  # ranks of a node


def ring(order: list[int]) -> Iterator[Message]:
    """All-reduce: 2 (n-1) rounds, in each every node sends 1/n of the buffer to the next."""
    for here, there in zip(order, order[1:] + order[:1]):
        yield here, there, 2 * (len(order) - 1) / len(order)


def tree() -> Iterator[Message]:
    """All-reduce: up a binomial tree and down again, the whole buffer over each edge."""
    for node in range(1, NODES):
        parent = node & (node - 1)
        yield node, parent, 1.0
        yield parent, node, 1.0


def all_to_all() -> Iterator[Message]:
    for here, there in itertools.permutations(range(NODES), 2):
        yield here, there, 1 / NODES


def on_torus(here: int, there: int) -> list[Link]:
    """Route along rows first, then along columns, each the shorter way round.

    Where both ways are as long, every other node takes each.
    """
    place = [*divmod(here, SIDE)]
    target = divmod(there, SIDE)
    route = []
    for axis in (1, 0):
        ahead = (target[axis] - place[axis]) % SIDE
        forward = 2 * ahead < SIDE or (2 * ahead == SIDE and sum(place) % 2 == 0)
        for _ in range(min(ahead, SIDE - ahead)):
            before = tuple(place)
            place[axis] = (place[axis] + (1 if forward else -1)) % SIDE
            route.append((before, tuple(place)))
    return route


def on_fat_tree(uplinks: int) -> Callable[[int, int], list[Link]]:
    """Route over a leaf switch, and over a spine if the nodes have other leaves.

    A leaf has `uplinks` links upwards; which one is taken depends on the target (static routing).
    """

    def route(here: int, there: int) -> list[Link]:
        leaf, other = f"leaf {here // SIDE}", f"leaf {there // SIDE}"
        if leaf == other:
            return [(here, leaf), (leaf, there)]
        spine = f"spine {there % SIDE % uplinks}"
        return [(here, leaf), (leaf, spine), (spine, other), (other, there)]

    return route


def carried(messages: Iterable[Message], route: Callable[[int, int], list[Link]]) -> tuple[float, float]:
    """Return what the busiest link carries, and the mean number of links of a message."""
    load: Counter[Link] = Counter()
    hops = []
    for here, there, share in messages:
        links = route(here, there)
        hops.append(len(links))
        for link in links:
            load[link] += share
    return max(load.values()), sum(hops) / len(hops)


def snake() -> list[int]:
    """Return the nodes of a torus in an order in which neighbours are one link apart."""
    rows = [range(row * SIDE, (row + 1) * SIDE) for row in range(SIDE)]
    return [node for number, row in enumerate(rows) for node in (row if number % 2 == 0 else reversed(row))]


def shuffled() -> list[int]:
    """Return an order that knows nothing of the network, the same each time."""
    return random.Random(1).sample(range(NODES), NODES)


def times(num_bytes: int) -> dict[str, float]:
    """Return seconds of an all-reduce of RANKS ranks, NEIGHBOURS on a node, by the alpha-beta model."""
    nodes = RANKS // NEIGHBOURS
    far_s, far_rate = FAR
    near_s, near_rate = NEAR
    share = (RANKS - 1) / RANKS
    hops = 2 * (nodes * far_s + (RANKS - nodes) * near_s)
    in_node = 2 * ((NEIGHBOURS - 1) * near_s + num_bytes * (NEIGHBOURS - 1) / NEIGHBOURS / near_rate)
    between = 2 * ((nodes - 1) * far_s + num_bytes / NEIGHBOURS * (nodes - 1) / nodes / far_rate)
    rounds = 2 * (math.log2(nodes) * far_s + math.log2(NEIGHBOURS) * near_s)
    to_each = math.log2(nodes) / far_rate + math.log2(NEIGHBOURS) / near_rate
    return {
        "one ring": hops + 2 * num_bytes * share / far_rate,
        "binary tree": rounds + 2 * num_bytes * to_each,
        "two levels": in_node + between,
    }


def main() -> None:
    routes = {
        "4 x 4 torus": on_torus,
        "fat tree, 4 uplinks a leaf": on_fat_tree(4),
        "fat tree, 1 uplink a leaf": on_fat_tree(1),
    }
    patterns = {
        "ring in order": lambda: ring(list(range(NODES))),
        "ring as a snake": lambda: ring(snake()),
        "ring shuffled": lambda: ring(shuffled()),
        "binomial tree": tree,
        "all-to-all": all_to_all,
    }
    links = [
        [pattern, network, *carried(messages(), route)]
        for pattern, messages in patterns.items()
        for network, route in routes.items()
    ]
    found = [[size, name, s * 1e6] for size in (1 << 10, 1 << 20, 1 << 28) for name, s in times(size).items()]
    print(json.dumps({"links": links, "times": found}))


if __name__ == "__main__":
    main()

"""Silent data corruption: are the copies of what several ranks have alike still alike?

    weights           whole, as they are computed with: on all data-parallel ranks, but with ZeRO-3;
                      norms also on those of tensor parallelism
    master, moments   this rank's part: on the ranks of `replicate`
    a tied embedding  on other ranks of the pipeline; so are the two models of DualPipe

The same part of the same tensor has one key. Keys are dealt over all ranks, and each compares the
digests of its own (64 bits of xxHash): 16 bytes a tensor and rank travel. A majority is believed.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch
import xxhash

from mpitrain.actor.actor import Actor
from mpitrain.cluster.unhealthy_nodes import node_name
from mpitrain.comm.base.world import World
from mpitrain.training.checks.digests import digest

MOST_NAMED = 8


class Odd(NamedTuple):
    """A part of a tensor of which ranks have different copies.

    ranks: those with another one than most; all, if there is no majority.
    """

    key: int
    ranks: tuple[int, ...]
    num_copies: int


class Corruption(NamedTuple):
    """What can't be relied on. text: "" if all is well. nodes: those that are known to err, by a majority."""

    text: str = ""
    nodes: tuple[str, ...] = ()


def different(actor: Actor, world: World) -> Corruption:
    """Return which copies differ, alike on all ranks. Collective; waits for arriving weights."""
    names = dict[int, str]()
    digests = dict[int, int]()
    for name, x in _state(actor):
        key = xxhash.xxh3_64_intdigest(name.encode())
        names[key], digests[key] = name, digest([x])
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(world.size)]
    for key, value in digests.items():
        dealt[key % world.size].append((key, value))
    odd = _judge(world.all_to_all("comparing replicas", dealt))
    differences = [difference for part in world.all_gather("comparing replicas", odd) for difference in part]
    return _describe(differences, names, world) if differences else Corruption()


def _judge(by_rank: list[list[tuple[int, int]]]) -> list[Odd]:
    """Return what differs, of (key, digest) of every rank."""
    copies = defaultdict[int, dict[int, int]](dict)
    for rank, items in enumerate(by_rank):
        for key, value in items:
            copies[key][rank] = value
    odd = []
    for key, of_rank in copies.items():
        (most, votes), *others = Counter(of_rank.values()).most_common()
        if others:
            minority = tuple(rank for rank, value in of_rank.items() if value != most)
            odd.append(Odd(key, minority if 2 * votes > len(of_rank) else tuple(of_rank), len(of_rank)))
    return odd


def _describe(differences: list[Odd], names: dict[int, str], world: World) -> Corruption:
    """Name ranks, nodes and tensors. Collective over all ranks."""
    own_names = {odd.key: names.get(odd.key) for odd in differences}
    known = world.all_gather("naming replicas that differ", (node_name(), own_names))
    texts = []
    nodes = dict[str, None]()
    for odd in sorted(differences, key=lambda odd: (len(odd.ranks), odd.ranks)):
        what = next(what_by_key[odd.key] for _, what_by_key in known if what_by_key[odd.key])
        who = " or ".join(f"rank {rank} on {known[rank][0]}" for rank in odd.ranks[:MOST_NAMED])
        if len(odd.ranks) < odd.num_copies:
            texts.append(f"{what} of {who} is not that of the other {odd.num_copies - len(odd.ranks)}")
            nodes |= dict.fromkeys(known[rank][0] for rank in odd.ranks)
        else:
            between = who.replace(" or ", " and ")
            texts.append(f"{what} differs between {between}, and no other copy shows which is right")
    more = f"; and {len(texts) - MOST_NAMED} more" if len(texts) > MOST_NAMED else ""
    return Corruption("; ".join(texts[:MOST_NAMED]) + more, tuple(nodes))


def _state(actor: Actor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what this rank has, by a name that says which part of the model it is."""
    for stage in actor.stages.values():
        for bucket in stage.state.buckets:
            bucket.weights.wait()
            views = bucket.weights.views() if bucket.weights.whole is not None else ()
            yield from ((f"weights/{spec.name}{_at(spec.offset)}", x) for spec, x in views)
    for piece in actor.gradients.pieces:
        where = f"{piece.spec.name}{_at(piece.spec.offset)}[{piece.begin}:{piece.end}]"
        yield f"master/{where}", piece.weight
        yield from ((f"{what}/{where}", x) for what, x in actor.optimizer.moments(piece))


def _at(offset: tuple[int, ...]) -> str:
    return f" at {offset}" if any(offset) else ""

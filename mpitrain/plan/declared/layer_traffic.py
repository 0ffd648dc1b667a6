"""What the items of a layer send over tp and cp, for Layer.traffic. Integers and names only.

Each function has the name of the one that builds the items: into, out, between, residual and
sublayer of BuildContext (model/build_context.py), attended() of model/attention.py.
"""

from collections.abc import Iterable

from mpitrain.plan.declared.layer import Sizes
from mpitrain.plan.declared.traffic import LOCAL, Started, Traffic, attention, chunked, communication, in_one

Items = tuple[Traffic, ...]


def into(sizes: Sizes, width: int) -> Traffic:
    """Return what brings activations of a width to a layer that tp divides."""
    name = "gather" if sizes.config.parallel.sequence else "copy"
    return communication(name, sizes.gathered(width))


def out(sizes: Sizes, width: int) -> Traffic:
    """Return what brings the partial results of such a layer back."""
    name = "scatter" if sizes.config.parallel.sequence else "sum"
    return communication(name, sizes.gathered(width))


def between(
    sizes: Sizes, inner: Iterable[Traffic], width: int, width_before: int = 0, *, normed: bool = False
) -> Items:
    """Return items between what brings activations to them and their partial results back.

    width_before: of what is brought; 0: `width`, too.
    normed: there is a norm before that; without tp, `inner` has it.
    """
    if sizes.tp == 1:
        return tuple(inner)
    gathered = into(sizes, width_before or width)
    if sizes.regathers:  # one item, whose backward gathers its input again (model/regather.py)
        whole = in_one((gathered, *inner))
        return Traffic(whole.forward, gathered.forward + whole.backward), out(sizes, width)
    return *_norm_alone(sizes, normed), gathered, *inner, out(sizes, width)


def residual(sizes: Sizes, width: int) -> Items:
    """Return the items of x + inner(norm(x)); without tp, `inner` has the norm."""
    return between(sizes, (LOCAL,), width, normed=True)


def sublayer(sizes: Sizes, width: int, *, normed: bool = True, num_after: int = 0) -> Items:
    """Return the same, of an item that treats each position alone.

    num_after: items after the sum, such as a bias.
    """
    items = between(sizes, (LOCAL,), width, normed=normed)
    if by_chunks(sizes):
        chunk = sizes.stream(width)
        both = chunked("tp", sizes.tp, gathered=chunk, scattered=chunk)
        items = *_norm_alone(sizes, normed), both
    return *items, *num_after * (LOCAL,)


def attended(
    sizes: Sizes,
    heads: tuple[int, int, int],
    width: int,
    width_before: int,
    *,
    normed: bool = False,
    with_width_norms: bool = False,
) -> Items:
    """Return the items of projection, attention proper and output.

    heads: of this rank: queries, keys and values, and the width of one.
    width, width_before: of the output, and of what the projection is given.
    normed: there is a norm before what tp sends.
    with_width_norms: tp divides norms of all heads together.
    """
    over_cp = attention_over_cp(sizes, heads)
    # two numbers a position, each way (model/width_norm.py)
    sums = (Started("all_reduce", "tp", 2 * sizes.positions * sizes.wide),)
    norms = (Traffic(sums, sums),) if with_width_norms and sizes.tp > 1 else ()
    if by_chunks(sizes):
        before = chunked("tp", sizes.tp, gathered=sizes.stream(width_before))
        output_sum = chunked("tp", sizes.tp, scattered=sizes.stream(width))
        first = _norm_alone(sizes, normed)
        if over_cp:
            return *first, in_one((before, *norms, over_cp, output_sum))
        return *first, before, *norms, LOCAL, output_sum
    inner = (in_one((*norms, over_cp)),) if over_cp else (LOCAL, *norms, LOCAL) if norms else (LOCAL,)
    return between(sizes, inner, width, width_before, normed=normed)


def attention_over_cp(sizes: Sizes, heads: tuple[int, int, int]) -> Traffic | None:
    """Return what attention proper sends where the sequence is spread over ranks; None where it isn't."""
    config = sizes.config
    if config.parallel.cp == 1:
        return None
    queries, kv, width = heads
    return attention(
        config.parallel.context,
        "cp",
        config.parallel.cp,
        batch=config.batch.micro,
        heads=queries,
        kv_heads=kv,
        head_width=width,
        sequence=config.data.sequence,
        itemsize=sizes.itemsize,
    )


def by_chunks(sizes: Sizes) -> bool:
    """Return whether what tp sends goes chunk by chunk."""
    return sizes.tp > 1 and sizes.config.parallel.async_tp


def _norm_alone(sizes: Sizes, normed: bool) -> Items:
    """Return the norm as an item of its own, before what tp sends; else the item after it has it."""
    return (LOCAL,) if normed and sizes.tp > 1 else ()

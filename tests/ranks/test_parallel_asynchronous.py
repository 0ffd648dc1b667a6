"""Gather, compute and scatter by chunks equal the three one after the other.

An item and its backward are adjoint.
"""

import pytest
from conftest import agree

FLAGS = {"gather": (True, False), "scatter": (False, True), "both": (True, True)}
LENGTHS = (1, 2, 5)  # positions of a chunk: with 1, the own chunk has no halves
WIDTH = 8
FFN = 12
BATCH = 2

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]


@pytest.fixture(scope="module")  # communicators are slow to make on more ranks than cores
def axis():
    from mpi4py.MPI import COMM_WORLD

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    mesh = Mesh(COMM_WORLD, Grid({"tp": COMM_WORLD.size}), timeout_s=60)
    yield mesh["tp"]
    mesh.free()


def random(axis, *shape):
    """Return numbers that are this rank's own."""
    import torch

    return torch.randn(
        shape, generator=torch.Generator().manual_seed(1000 * sum(shape) + axis.rank), dtype=torch.float64
    )


def parameter(axis, *shape):
    import torch

    from mpitrain.parallel.zero.parameters import Parameter
    from mpitrain.plan.declared.parameters import Spec

    data = random(axis, *shape)
    return Parameter(Spec("w", shape), data, torch.zeros_like(data))


def segments(axis, length):
    """Return (segment, its parameters, flags, shape of the input here, of the output) of all that
    goes by chunks.
    """
    import torch

    from mpitrain.model.attention import Output, Projection
    from mpitrain.model.feed_forward import FeedForwardSegment
    from mpitrain.model.layers.rope import Rope
    from mpitrain.model.rotary import Rotary

    whole = length * axis.size
    gate, up, q = (parameter(axis, FFN, WIDTH) for _ in range(3))
    down, k, v, output = (
        parameter(axis, WIDTH, FFN),
        *(parameter(axis, 4, WIDTH) for _ in range(2)),
        parameter(axis, WIDTH, FFN),
    )
    rotary = Rotary(Rope(4, 10_000.0), torch.arange(3 + whole), 3 + whole, torch.float64, torch.device("cpu"))
    heads = [(BATCH, n, whole, 4) for n in (3, 1, 1)]
    return {
        "both": (
            FeedForwardSegment(None, (gate, up), down),
            (gate, up, down),
            (BATCH, length, WIDTH),
            [(BATCH, length, WIDTH)],
        ),
        "gather": (Projection(None, (q, k, v), rotary, 4), (q, k, v), (BATCH, length, WIDTH), heads),
        "scatter": (Output(output), (output,), (BATCH, 3, whole, 4), [(BATCH, length, WIDTH)]),
    }


def chunked(flags, segment, axis):
    from mpitrain.parallel.async_tp import Chunked

    gather, scatter = FLAGS[flags]
    return [Chunked(segment, axis, gather=gather, scatter=scatter)]


def plain(flags, segment, axis):
    from mpitrain.parallel.communication import Communication

    gather, scatter = FLAGS[flags]
    return [
        *[Communication("gather", axis, 1)] * gather,
        segment,
        *[Communication("scatter", axis, 1)] * scatter,
    ]


def both_ways(block, parameters, x, grads):
    """Run a block from position 3 on; return its outputs, the gradient of its input and those of
    its weights.
    """
    from mpitrain.parallel.microbatch import Context
    from mpitrain.parallel.walk import backward, forward, run

    for p in parameters:
        p.grad.zero_()
    y, saved = run(forward(block, x, Context(start=3)))
    grad = run(backward(block, saved, grads if isinstance(y, tuple) else grads[0]))
    return [*(y if isinstance(y, tuple) else (y,)), grad, *(p.grad.clone() for p in parameters)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("flags", FLAGS)
def test_chunks_equal_gather_segment_scatter(axis, flags, length):
    segment, parameters, shape, shapes = segments(axis, length)[flags]
    x = random(axis, *shape)
    grads = tuple(random(axis, *s) for s in shapes)
    before = x.clone()
    found, expected = (both_ways(way(flags, segment, axis), parameters, x, grads) for way in (chunked, plain))
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]
    agree(axis.comm, max(errors) < 1e-12 and x.equal(before), f"relative errors {errors}")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("flags", FLAGS)
def test_an_item_is_adjoint_to_its_backward(axis, flags, length):
    """<A x, z> = <x, A* z> for a product with a matrix of each rank's own.

    Nothing is replicated, so all ranks' numbers count.
    """
    from mpitrain.model.segment import Segment
    from mpitrain.parallel.microbatch import Context
    from mpitrain.parallel.walk import backward, forward, run

    matrix = random(axis, WIDTH, FFN)

    class Linear(Segment):
        def compute(self, x, context, tape):
            return x @ matrix

    gather, scatter = FLAGS[flags]
    block = chunked(flags, Linear(), axis)
    x = random(axis, BATCH, length if gather else length * axis.size, WIDTH)
    y, saved = run(forward(block, x, Context()))
    z = random(axis, BATCH, length if scatter else length * axis.size, FFN)
    back = run(backward(block, saved, z))
    left, right = (axis.comm.allreduce((a * b).sum().item()) for a, b in ((y, z), (x, back)))
    agree(axis.comm, abs(left - right) < 1e-10 * (1 + abs(left)), f"{left} and {right}")


@pytest.mark.parametrize("flags", FLAGS)
def test_what_is_declared_is_what_is_started(axis, flags):
    from mpitrain.parallel.microbatch import Context
    from mpitrain.parallel.walk import backward, forward, run
    from mpitrain.plan.declared import traffic

    segment, _, shape, shapes = segments(axis, 5)[flags]
    x = random(axis, *shape)
    grads = tuple(random(axis, *s) for s in shapes)
    item = chunked(flags, segment, axis)
    gather, scatter = FLAGS[flags]
    chunk = BATCH * 5 * WIDTH * 8
    sizes = {"gathered": gather * chunk, "scattered": scatter * chunk}
    declared = traffic.chunked(axis.name, axis.size, **sizes)
    axis.account.log = forward_log = []
    y, saved = run(forward(item, x, Context()))
    axis.account.log = backward_log = []
    run(backward(item, saved, grads if isinstance(y, tuple) else grads[0]))
    axis.account.log = None
    logs = [
        [(s.operation, s.num_bytes) for s in started] for started in (declared.forward, declared.backward)
    ]
    agree(axis.comm, logs == [forward_log, backward_log], f"{logs} {forward_log} {backward_log}")


def test_without_gradients_nothing_is_kept(axis):
    import torch

    from mpitrain.parallel.microbatch import Context
    from mpitrain.parallel.walk import forward, run

    wrong = []
    for flags in FLAGS:
        segment, _, shape, _ = segments(axis, 2)[flags]
        with torch.no_grad():
            y, saved = run(forward(chunked(flags, segment, axis), random(axis, *shape), Context()))
        wrong += (
            [flags]
            if saved != [None] or any(part.requires_grad for part in (y if isinstance(y, tuple) else (y,)))
            else []
        )
    agree(axis.comm, not wrong, f"{wrong}")


def test_a_backward_for_inputs_leaves_the_weights_for_later(axis):
    import torch

    from mpitrain.parallel.microbatch import Context
    from mpitrain.parallel.walk import backward, forward, run

    segment, parameters, shape, shapes = segments(axis, 5)["both"]
    x = random(axis, *shape)
    grads = tuple(random(axis, *s) for s in shapes)
    expected = both_ways(chunked("both", segment, axis), parameters, x, grads)
    block = chunked("both", segment, axis)
    later = []
    for p in parameters:
        p.grad.zero_()
    y, saved = run(forward(block, x, Context(start=3)))
    grad = run(backward(block, saved, grads[0], later.append))
    untouched = not any(p.grad.any() for p in parameters)
    for products in later:
        products.add()
    found = [y, grad, *(p.grad for p in parameters)]
    agree(
        axis.comm,
        untouched and all(torch.equal(a, b) for a, b in zip(found, expected)),
        f"untouched: {untouched}",
    )


def test_weight_gradients_come_before_each_wait(axis, monkeypatch):
    """Those of the own half while the other chunks arrive, all of them while the results travel."""
    from mpitrain.parallel import walk
    from mpitrain.parallel.microbatch import Context
    from mpitrain.parallel.walk import backward, forward, run

    added = []
    at_waits = []
    wait = axis.progress.wait
    segment, _, shape, shapes = segments(axis, 4)["both"]
    block = chunked("both", segment, axis)
    _, saved = run(forward(block, random(axis, *shape), Context()))
    for name in ("_add_now", "_add_one_by_one"):  # at once, or one by one
        add = getattr(walk, name)
        monkeypatch.setattr(walk, name, lambda waiting, add=add: added.extend(waiting) or add(waiting))
    monkeypatch.setattr(axis.progress, "wait", lambda pending: at_waits.append(len(added)) or wait(pending))
    run(backward(block, saved, random(axis, *shapes[0])))
    num_others = axis.size - 1
    agree(axis.comm, at_waits == [*range(1, axis.size), *num_others * [axis.size + 1]], f"{at_waits}")


def events(axis, monkeypatch, flags):
    """Return what a forward does, in order: sends, and computes so many positions."""
    from mpitrain.parallel import async_tp as asynchronous
    from mpitrain.parallel.microbatch import Context
    from mpitrain.parallel.walk import forward, run

    seen = []
    shift = asynchronous.shift
    segment, _, shape, _ = segments(axis, 4)[flags]
    compute = segment.compute
    segment.compute = lambda x, context, tape: (
        seen.append(("compute", context.start // 4, x.shape[-2])) or compute(x, context, tape)
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            asynchronous,
            "shift",
            lambda x, axis, distance: seen.append(("send", distance)) or shift(x, axis, distance),
        )
        run(forward(chunked(flags, segment, axis), random(axis, *shape), Context()))
    return seen


def test_chunks_are_computed_as_they_come_and_leave_at_once(axis, monkeypatch):
    others = [(d, ("compute", (axis.rank - d) % axis.size, 4)) for d in range(1, axis.size)]
    arriving = [("send", d) for d, _ in others]
    leaving = [event for d, computed in others for event in (computed, ("send", -d))]
    own = ("compute", axis.rank, 4)
    half = ("compute", axis.rank, 2)
    expected = {
        "gather": [*arriving, own, *(computed for _, computed in others)],
        "scatter": [*leaving, own],
        "both": [*arriving, half, *leaving, half],
    }
    found = {flags: events(axis, monkeypatch, flags) for flags in FLAGS}
    agree(axis.comm, found == expected, f"{found}")

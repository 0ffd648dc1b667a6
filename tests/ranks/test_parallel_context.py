"""Attention spread over the cp axis against plain attention over the whole sequence, in fp64.

Output and all gradients.
"""

import pytest
from conftest import agree

KINDS = ["ring", "zigzag", "gather", "ulysses"]
# heads, key-value heads; under ulysses on 4 and 8 ranks the latter are copied
GROUPS = [(8, 8), (8, 2), (8, 1)]
WIDTH = 8

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]


@pytest.fixture(autouse=True)
def short_spans(monkeypatch):
    """Sequences are short: some documents are computed alone, others together."""
    from mpitrain.kernels import document_spans

    monkeypatch.setattr(document_spans, "LEAST", 6)


def new_mesh(transport):
    from mpi4py.MPI import COMM_WORLD

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    return Mesh(COMM_WORLD, Grid({"cp": COMM_WORLD.size}), transport=transport, timeout_s=60)


@pytest.fixture(scope="module")  # communicators are slow to make on more ranks than cores
def axis():
    mesh = new_mesh("messages")
    yield mesh["cp"]
    mesh.free()


@pytest.fixture(params=["collectives", "shared"], scope="module")
def other_axis(request):
    mesh = new_mesh(request.param)
    yield mesh["cp"]
    mesh.free()


def whole_tensors(heads, kv_heads, sequence, batch=2):
    """q, k, v and the gradient of the output for the whole sequence, alike on all ranks."""
    import torch

    seed = torch.Generator().manual_seed(7)
    shapes = [(batch, n, sequence, WIDTH) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=seed, dtype=torch.float64) for shape in shapes]


def documents_of(case, sequence):
    """Documents that cross the cuts between ranks; their numbers are in no order."""
    import torch

    if case == "none":
        return None
    place = torch.arange(sequence)
    if case == "many":
        return torch.stack((place // 5 * 7 % 29, (place > sequence // 3).long()))
    return {"one": place * 0, "of one token": place, "alike in the batch": (place * 3 // sequence)}[case]


def dense(q, k, v, grad, documents):
    """Attention by its definition, differentiated by autograd."""
    import torch

    leaves = q, k, v = [x.clone().requires_grad_() for x in (q, k, v)]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / WIDTH**0.5
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if documents is not None:
        documents = documents.view(-1, 1, documents.shape[-1])
        visible = visible & (documents[..., :, None] == documents[..., None, :])
    out = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def spread(axis, kind, tensors, documents, dtype=None):
    """Run one attention on this rank's part of each tensor.

    Return its parts of the output and of the gradients.
    """
    import torch

    from mpitrain.kernels.attention import AttentionRequest
    from mpitrain.parallel.context.attention import ContextAttention
    from mpitrain.parallel.walk import run

    heads = tensors[0].shape[1]
    kv_heads = tensors[1].shape[1]
    sequence = tensors[0].shape[2]
    attention = ContextAttention(axis, kind, sequence, heads, kv_heads, WIDTH)
    here = torch.from_numpy(attention.placement.positions(axis.rank))
    # as a model has them: heads beside positions in memory
    q, k, v, grad = (
        x[:, :, here].to(dtype or x.dtype).transpose(1, 2).contiguous().transpose(1, 2) for x in tensors
    )
    before = [x.clone() for x in (q, k, v, grad)]
    out, saved = run(attention.forward(q, k, v, AttentionRequest(documents=documents)))
    grads = run(attention.backward(saved, grad))
    assert all(torch.equal(x, y) for x, y in zip(before, (q, k, v, grad))), "an input was changed"
    return [out, *grads], here


def errors(found, here, expected):
    """Return the largest difference of each, relative to the largest value (0.001 where all are zero).

    Inf for NaN.
    """
    import torch

    def error(x, whole):
        return (
            ((x.double() - whole[:, :, here]).abs().max() / whole.abs().max().clamp(min=1e-3))
            .nan_to_num(torch.inf)
            .item()
        )

    return dict(zip(("out", "dq", "dk", "dv"), (error(x, whole) for x, whole in zip(found, expected))))


@pytest.mark.parametrize("case", ["none", "many", "one", "of one token", "alike in the batch"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_equals_that_of_one_process(axis, kind, case):
    wrong = []
    for heads, kv_heads in GROUPS:
        tensors = whole_tensors(heads, kv_heads, 48)
        documents = documents_of(case, 48)
        found = errors(*spread(axis, kind, tensors, documents), dense(*tensors, documents))
        wrong += [(heads, kv_heads, found)] if max(found.values()) > 1e-10 else []
    agree(axis.comm, not wrong, f"{wrong}")


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_positions_that_divides_will_do(axis, kind):
    """From one or two positions a rank on; plain placement takes odd numbers."""
    wrong = []
    for length in (2, 6, 34, *((1, 7) if kind in ("ring", "ulysses") else ())):
        tensors = whole_tensors(8, 2, length * axis.size, batch=1)
        found = errors(*spread(axis, kind, tensors, None), dense(*tensors, None))
        wrong += [(length, found)] if max(found.values()) > 1e-10 else []
    agree(axis.comm, not wrong, f"{wrong}")


@pytest.mark.parametrize(("dtype", "budget"), [("float32", 3e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_numbers_stay_within_their_budget(axis, kind, dtype, budget):
    """Rounding of the inputs isn't counted: the dense attention gets the rounded ones."""
    import torch

    narrow = getattr(torch, dtype)
    tensors = [x.to(narrow).double() for x in whole_tensors(8, 2, 128)]
    documents = documents_of("many", 128)
    parts, here = spread(axis, kind, tensors, documents, narrow)
    found = errors(parts, here, dense(*tensors, documents))
    agree(axis.comm, max(found.values()) < budget and all(x.dtype == narrow for x in parts), f"{found}")


def test_large_scores_neither_overflow_nor_vanish(axis):
    """Scores of some thousands: their exponentials exist only relative to the log-sum-exp."""
    wrong = []
    for kind in KINDS:
        q, k, v, grad = whole_tensors(8, 2, 48)
        tensors = [30 * q, 30 * k, v, grad]
        found = errors(*spread(axis, kind, tensors, None), dense(*tensors, None))
        wrong += [(kind, found)] if max(found.values()) > 1e-10 else []
    agree(axis.comm, not wrong, f"{wrong}")


@pytest.mark.parametrize("kind", KINDS)
def test_all_transports_give_the_same_bits(axis, other_axis, kind):
    import torch

    tensors = whole_tensors(8, 2, 48)
    documents = documents_of("many", 48)
    (expected, _), (found, _) = (
        spread(a, kind, tensors, documents, torch.float32) for a in (axis, other_axis)
    )
    agree(axis.comm, all(torch.equal(a, b) for a, b in zip(found, expected)))


# ---------------------------------------------------------------- what is sent, and when


def counted(axis, walk):
    """Run a walk; return (operation, axis, bytes of its buffer) of what it started, the bytes it
    posted, and its result.
    """
    from mpitrain.parallel.walk import run

    axis.account.log, before = [], axis.account.num_bytes
    result = run(walk)
    started = [(operation, axis.name, n) for operation, n in axis.account.log]
    axis.account.log = None
    return started, axis.account.num_bytes - before, result


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_traffic_is_what_is_sent_to_the_byte(axis, kind, dtype):
    import torch

    from mpitrain.comm.base.wire import sent_bytes
    from mpitrain.parallel.context.attention import ContextAttention
    from mpitrain.plan.declared import traffic

    wrong = []
    for heads, kv_heads in GROUPS:
        attention = ContextAttention(axis, kind, 48, heads, kv_heads, WIDTH)
        here = torch.from_numpy(attention.placement.positions(axis.rank))
        q, k, v, grad = (x[:, :, here].to(getattr(torch, dtype)) for x in whole_tensors(heads, kv_heads, 48))
        numbers = dict(batch=2, heads=heads, kv_heads=kv_heads, head_width=WIDTH, sequence=48)
        declared = traffic.attention(kind, axis.name, axis.size, **numbers, itemsize=q.element_size())
        forward, posted, (_, saved) = counted(axis, attention.forward(q, k, v))
        backward, posted_back, _ = counted(axis, attention.backward(saved, grad))
        for found, num_bytes, expected in (
            (forward, posted, declared.forward),
            (backward, posted_back, declared.backward),
        ):
            wire = sum(sent_bytes(operation, n, axis.size) for operation, _, n in expected)
            if found != list(expected) or num_bytes != wire:
                wrong.append((heads, kv_heads, found, expected, num_bytes, wire))
    agree(axis.comm, not wrong, f"{wrong}")


def test_keys_and_values_of_the_next_turn_travel_while_this_one_computes(axis, monkeypatch):
    """Before tile n of a zigzag ring is computed, n + 1 shifts have been started, in both directions."""
    import torch

    from mpitrain.parallel.context import online_softmax
    from mpitrain.parallel.context.attention import ContextAttention
    from mpitrain.parallel.walk import run

    started = []
    at_tiles = []
    start = axis.start
    monkeypatch.setattr(axis, "start", lambda *a, **options: started.append(a) or start(*a, **options))
    for name in ("attend", "attend_backward"):
        compute = getattr(online_softmax, name)
        monkeypatch.setattr(
            online_softmax, name, lambda *a, compute=compute: at_tiles.append(len(started)) or compute(*a)
        )
    attention = ContextAttention(axis, "zigzag", 48, 8, 2, WIDTH)
    here = torch.from_numpy(attention.placement.positions(axis.rank))
    q, k, v, grad = (x[:, :, here] for x in whole_tensors(8, 2, 48))
    _, saved = run(attention.forward(q, k, v))
    forward = list(at_tiles)
    size = axis.size
    started.clear(), at_tiles.clear()
    run(attention.backward(saved, grad))
    expected = [min(turn + 1, size - 1) for turn in range(size)]
    # the own keys first; then a shift of keys and one of gradients a turn; the gradient's way home
    # beside the own keys' two last tiles
    in_backward = (
        [min(1, size - 1)]
        + [min(turn + 1, size - 1) + turn - 1 for turn in range(1, size)]
        + [2 * (size - 1)] * 2
    )
    agree(
        axis.comm, forward == expected and at_tiles == in_backward, f"{forward}, {at_tiles} and {in_backward}"
    )


def test_the_forward_keeps_no_graph(axis):
    import torch

    from mpitrain.parallel.context.attention import ContextAttention
    from mpitrain.parallel.walk import run

    kept = []
    for kind in KINDS:
        attention = ContextAttention(axis, kind, 48, 8, 2, WIDTH)
        here = torch.from_numpy(attention.placement.positions(axis.rank))
        q, k, v, _ = (x[:, :, here].requires_grad_() for x in whole_tensors(8, 2, 48))
        out, saved = run(attention.forward(q, k, v))
        kept += [kind for x in (out, *saved) if x is not None and x.requires_grad]
    agree(axis.comm, not kept, f"{kept}")

"""Answers to the exercises of docs/course/ that need several ranks.

Data, ZeRO, tensor and context parallelism; each is written with the collectives of comm/, and checked
against one process of plain torch.
"""

import pytest
from conftest import agree

pytestmark = [pytest.mark.mpi, pytest.mark.few_ranks]


@pytest.fixture(scope="module")
def axis():
    from mpi4py.MPI import COMM_WORLD

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    mesh = Mesh(COMM_WORLD, Grid({"ranks": COMM_WORLD.size}), transport="messages", timeout_s=60)
    yield mesh["ranks"]
    mesh.free()


def numbers(*shape, seed):
    """Random numbers in fp64, alike on all ranks."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a, b):
    import torch

    return torch.allclose(a, b, rtol=1e-10, atol=1e-12)


# ------------------------------------------------------------------ data parallelism: sums in buckets


def summed_in_buckets(grads, axis, most_elements):
    """Start one sum a bucket as soon as it is full, the last gradient first; wait for all at the end."""
    import torch

    from mpitrain.comm.collectives import all_reduce

    started, bucket = [], []
    for grad in reversed(grads):
        bucket.append(grad)
        if sum(map(torch.numel, bucket)) >= most_elements or grad is grads[0]:
            flat = torch.cat([each.flatten() for each in bucket])
            started.append((bucket, flat, all_reduce(flat, axis)))
            bucket = []
    for held, flat, pending in started:
        pending.wait()
        for grad, part in zip(held, flat.split([each.numel() for each in held]), strict=True):
            grad.copy_(part.view_as(grad))
    return len(started)


def test_buckets_have_the_sum_of_all_ranks_and_send_what_one_sum_sends(axis):
    import torch

    from mpitrain.comm.base.wire import sent_bytes

    shapes = [(256, 64), (64,), (64, 256), (512, 64)]
    grads = [numbers(*shape, seed=axis.rank) for shape in shapes]
    each = [[numbers(*shape, seed=rank) for shape in shapes] for rank in range(axis.size)]
    before = axis.account.read()
    num_buckets = summed_in_buckets(grads, axis, most_elements=20_000)
    sent = axis.account.read().minus(before).num_bytes
    right = all(close(grad, sum(column)) for grad, column in zip(grads, zip(*each)))
    whole = 8 * sum(map(torch.numel, grads))
    agree(axis.comm, right and num_buckets == 2, f"{num_buckets} buckets")
    agree(axis.comm, sent == sent_bytes("all_reduce", whole, axis.size, axis.rank), f"sent {sent} of {whole}")


# ------------------------------------------------------------------------- ZeRO-1: Adam on a shard


def zero_1(weights, grad_of, axis, steps, lr=1e-2):
    """Reduce-scatter the gradient, update the own shard with AdamW, gather the weights."""
    import torch

    from mpitrain.comm.base.grid import split
    from mpitrain.comm.collectives import all_gather, reduce_scatter

    begin, end = split(len(weights), axis.size)[axis.rank : axis.rank + 2]
    shard = torch.nn.Parameter(weights[begin:end].clone())
    adam = torch.optim.AdamW([shard], lr=lr)
    for step in range(steps):
        shard.grad = reduce_scatter(grad_of(weights, step), axis).wait()
        adam.step()
        all_gather(shard.detach(), axis, weights).wait()
    return sum(value.numel() for value in adam.state[shard].values() if value.numel() > 1)


def test_zero_1_has_the_weights_of_adam_on_one_rank_and_a_share_of_its_moments(axis):
    import torch

    length, steps = 4096, 3
    targets = [numbers(length, seed=10 + rank) for rank in range(axis.size)]
    weights = numbers(length, seed=1)
    moments = zero_1(weights, lambda w, step: (w - targets[axis.rank]) * (step + 1), axis, steps)

    whole = torch.nn.Parameter(numbers(length, seed=1))
    adam = torch.optim.AdamW([whole], lr=1e-2)
    for step in range(steps):
        whole.grad = sum((whole.detach() - target) * (step + 1) for target in targets)
        adam.step()
    agree(axis.comm, close(weights, whole.detach()), "other weights than on one rank")
    agree(axis.comm, moments == 2 * length // axis.size, f"{moments} numbers of moments")


# ------------------------------------------------------------ tensor parallelism: columns, then rows


class ColumnParallel:
    """A linear layer whose outputs are divided: each rank has some rows of the matrix [outputs, inputs].

    The forward sends nothing. The backward sums the gradient of the input over the axis.
    """

    def __init__(self, whole_OI, axis):
        self.axis = axis
        self.matrix = whole_OI.chunk(axis.size, 0)[axis.rank].clone()

    def forward(self, x_NI):
        self.x = x_NI
        return x_NI @ self.matrix.T

    def backward(self, grad_NO):
        from mpitrain.comm.collectives import all_reduce

        self.grad = grad_NO.T @ self.x
        return all_reduce((grad_NO @ self.matrix).contiguous(), self.axis).wait()


class RowParallel:
    """The layer after it: its inputs are divided, and its forward sums the output over the axis."""

    def __init__(self, whole_OI, axis):
        self.axis = axis
        self.matrix = whole_OI.chunk(axis.size, 1)[axis.rank].clone()

    def forward(self, x_NI):
        from mpitrain.comm.collectives import all_reduce

        self.x = x_NI
        return all_reduce((x_NI @ self.matrix.T).contiguous(), self.axis).wait()

    def backward(self, grad_NO):
        self.grad = grad_NO.T @ self.x
        return grad_NO @ self.matrix


def test_a_column_parallel_and_a_row_parallel_layer_are_two_linears_of_one_rank(axis):
    import torch

    first, second = numbers(32, 16, seed=1), numbers(16, 32, seed=2)
    x, grad_of_output = numbers(5, 16, seed=3), numbers(5, 16, seed=4)
    column, row = ColumnParallel(first, axis), RowParallel(second, axis)
    hidden = column.forward(x)
    output = row.forward(hidden.tanh())
    grad_of_hidden = row.backward(grad_of_output) * (1 - hidden.tanh().square())
    grad_of_input = column.backward(grad_of_hidden)

    x.requires_grad_()
    whole = [first.requires_grad_(), second.requires_grad_()]
    expected = (x @ whole[0].T).tanh() @ whole[1].T
    torch.autograd.backward(expected, grad_of_output)
    own = whole[0].grad.chunk(axis.size, 0)[axis.rank], whole[1].grad.chunk(axis.size, 1)[axis.rank]
    agree(axis.comm, close(output, expected.detach()), "another output")
    agree(axis.comm, close(grad_of_input, x.grad), "another gradient of the input")
    agree(axis.comm, close(column.grad, own[0]) and close(row.grad, own[1]), "other gradients of the weights")


def test_a_block_of_both_sums_once_forward_and_once_backward(axis):
    column, row = ColumnParallel(numbers(32, 16, seed=1), axis), RowParallel(numbers(16, 32, seed=2), axis)
    before = axis.account.read()
    row.forward(column.forward(numbers(5, 16, seed=3)))
    column.backward(row.backward(numbers(5, 16, seed=4)))
    calls = axis.account.read().minus(before).calls
    agree(axis.comm, calls == 2, f"{calls} operations")


# ------------------------------------------------------------------------- context: a ring of keys


def ring_attention(q, kv, axis):
    """Attend to the keys of every rank as they come by, and merge by the log-sum-exp; not causal."""
    import math

    import torch

    from mpitrain.comm.collectives import shift

    out, lse = None, None
    for turn in range(axis.size):
        coming = shift(kv, axis) if turn < axis.size - 1 else None  # travels while we compute
        scores = q @ kv[0].mT / math.sqrt(q.shape[-1])
        new, new_lse = scores.softmax(-1) @ kv[1], scores.logsumexp(-1)
        if out is None:
            out, lse = new, new_lse
        else:
            whole = torch.logaddexp(lse, new_lse)
            out = out * (lse - whole).exp()[..., None] + new * (new_lse - whole).exp()[..., None]
            lse = whole
        if coming is not None:
            kv = coming.wait().view_as(kv)
    return out


def test_ring_attention_is_attention_over_the_whole_sequence(axis):
    import torch

    q, k, v = (numbers(2, 16, 8, seed=seed) for seed in (1, 2, 3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).chunk(axis.size, 1)[axis.rank]
    own = [x.chunk(axis.size, 1)[axis.rank] for x in (q, k, v)]
    before = axis.account.read()
    out = ring_attention(own[0], torch.stack(own[1:]), axis)
    sent = axis.account.read().minus(before).num_bytes
    agree(axis.comm, close(out, expected), "other attention")
    agree(axis.comm, sent == (axis.size - 1) * 2 * own[1].nbytes, f"sent {sent} bytes")

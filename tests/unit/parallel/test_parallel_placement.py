"""Where positions lie and which tiles they make, by counting; and the arithmetic of one tile.

One process, no messages.
"""

import sys

import numpy as np
import pytest
from launch import finished

from mpitrain.errors import ConfigError
from mpitrain.plan.declared.traffic import Started, attention
from mpitrain.plan.division import sequence
from mpitrain.plan.division.sequence import SequencePlacement, placement_of

CASES = [
    (name, length * size, size)
    for name in ("plain", "zigzag")
    for size in (1, 2, 3, 4, 8)
    for length in (2, 4, 6, 10)
]
CASES += [("plain", length * size, size) for size in (1, 2, 3, 4) for length in (1, 3, 7)]


def seen(placement, rank, tiles, keys):
    """Return the (query, key) pairs of some tiles by position.

    `keys` are the positions that the tiles' keys are slices of.
    """
    queries = list(placement.positions(rank))
    pairs = []
    for tile in tiles:
        for i, q in enumerate(queries[tile.queries]):
            pairs += [(q, k) for k in list(keys)[tile.keys][: i + 1 if tile.causal else None]]
    assert len(pairs) == sum(tile.num_pairs for tile in tiles)
    return pairs


def causal_pairs(placement, rank):
    return sorted((q, k) for q in placement.positions(rank) for k in range(q + 1))


def test_zigzag_gives_each_rank_an_early_and_a_late_chunk():
    placement = SequencePlacement("zigzag", 16, 4)
    assert [list(placement.positions(rank)) for rank in range(4)] == [
        [0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9],
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "sequence", "size"), CASES)
def test_every_position_is_on_one_rank_and_the_pieces_say_where(name, sequence, size):
    placement = SequencePlacement(name, sequence, size)
    whole = [None] * sequence
    for rank, held, positions in placement.pieces():
        whole[positions] = placement.positions(rank)[held]
    assert whole == list(range(sequence))
    assert all(len(placement.positions(rank)) == placement.length for rank in range(size))


@pytest.mark.parametrize(("name", "sequence", "size"), CASES)
def test_tiles_hold_each_causal_pair_once_and_no_other(name, sequence, size):
    placement = SequencePlacement(name, sequence, size)
    for rank in range(size):
        by_source = [
            pair
            for s in range(size)
            for pair in seen(placement, rank, placement.tiles(rank, s), placement.positions(s))
        ]
        assert sorted(by_source) == causal_pairs(placement, rank)
        own = seen(placement, rank, placement.tiles(rank, rank), placement.positions(rank))
        others = seen(placement, rank, placement.tiles_of_others(rank), range(sequence))
        assert sorted(own + others) == causal_pairs(placement, rank)
        first, rest = placement.own_in_two()
        assert sorted(seen(placement, rank, first + rest, placement.positions(rank))) == sorted(own)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_gives_all_ranks_the_same_work_in_every_turn(size):
    placement = SequencePlacement("zigzag", 12 * size, size)
    for turn in range(size):
        work = {
            sum(tile.num_pairs for tile in placement.tiles(rank, (rank - turn) % size))
            for rank in range(size)
        }
        assert len(work) == 1
    assert len({sum(tile.num_pairs for tile in placement.tiles_of_others(rank)) for rank in range(size)}) == 1
    first, rest = (sum(tile.num_pairs for tile in tiles) for tiles in placement.own_in_two())
    assert first < rest < 1.3 * first


@pytest.mark.parametrize(
    ("kind", "sequence", "size", "heads", "kv_heads", "expected"),
    [
        (
            "ring",
            30,
            4,
            8,
            2,
            "data.sequence = 30 doesn't divide into 4 equal chunks.*multiple of 4, such as 32",
        ),
        ("zigzag", 36, 8, 8, 2, "data.sequence = 36 doesn't divide into 16 equal chunks.*such as 32"),
        ("gather", 3, 2, 8, 2, "doesn't divide into 4 equal chunks.*such as 4"),
        (
            "ulysses",
            48,
            3,
            8,
            2,
            "cp = 3 spreads 8 heads and 2 key-value heads.*use cp = 1, 2, 4, 8, or zigzag",
        ),
        ("ulysses", 48, 2, 12, 3, "use cp = 1, 3, 6, 12, or"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(kind, sequence, size, heads, kv_heads, expected):
    with pytest.raises(ConfigError, match=expected):
        placement_of(kind, sequence, size, heads, kv_heads)


def test_settings_are_checked_without_torch():
    """A dry run on 512 ranks refuses what cannot work, and counts what is sent, without importing it."""
    code = "import sys, mpitrain.plan.division.sequence, mpitrain.plan.declared.traffic"
    code += "; sys.exit('torch' in sys.modules)"
    assert finished([sys.executable, "-c", code], timeout=60).returncode == 0


def test_traffic_in_numbers():
    """2 sequences of 16 positions, 4 heads, 2 key-value heads of width 8, on 4 ranks in bf16."""
    sizes = dict(batch=2, heads=4, kv_heads=2, head_width=8, sequence=16, itemsize=2)

    def started(kind):
        return attention(kind, "cp", 4, **sizes)

    def shifts(*num_bytes):
        return tuple(Started("shift", "cp", n) for n in num_bytes)

    kv = 2 * 2 * 2 * 4 * 8 * 2  # k and v, sequences, heads, positions here, width, bytes
    assert started("ring").forward == shifts(kv, kv, kv)
    # gradients in fp32
    assert started("zigzag").backward == shifts(kv, kv, 2 * kv, kv, 2 * kv, 2 * kv)
    assert started("gather").forward == (Started("all_gather", "cp", 4 * kv),)
    packed, out = (Started("all_to_all", "cp", 2 * heads * 4 * 8 * 2) for heads in (4 + 2 * 4, 4))
    assert started("ulysses").forward == (packed, out) == started("ulysses").backward[::-1]


# ---------------------------------------------------------------- one tile


def random_tile(dtype, num_queries, num_keys, device="cpu"):
    import torch

    seed = torch.Generator().manual_seed(5)
    shapes = [(2, 6, num_queries, 16), (2, 3, num_keys, 16), (2, 3, num_keys, 16), (2, 6, num_queries, 16)]
    return [torch.randn(shape, generator=seed, dtype=torch.float64).to(device, dtype) for shape in shapes]


def masks(num_queries, num_keys):
    """Nothing, and a mask that hides all keys from one query."""
    import torch

    visible = torch.rand(2, 1, num_queries, num_keys, generator=torch.Generator().manual_seed(1)) > 0.5
    visible[:, :, 3] = False
    return [None, visible]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_a_tile_by_products_equals_torchs_attention(causal, masked):
    import torch

    from mpitrain.kernels import attention_products as products
    from mpitrain.kernels import attention_tiles as tiles

    q, k, v, grad = random_tile(torch.float64, 20, 20)
    visible = masks(20, 20)[masked]
    out, lse = tiles.attend(q, k, v, causal, visible)
    by_products, lse_by_products = products.attend_by_products(q, k, v, causal, visible)
    torch.testing.assert_close(out, by_products, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, lse_by_products, rtol=1e-12, atol=1e-12)
    assert not masked or ((lse[:, :, 3] == -torch.inf).all() and (out[:, :, 3] == 0).all())
    lse = lse.clamp(min=-50.0)  # of all keys it is finite
    expected = products.attend_backward_by_products(grad, q, k, v, out, lse, causal, visible)
    for found, wanted in zip(tiles.attend_backward(grad, q, k, v, out, lse, causal, visible), expected):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("masked", ["causal", "mask", "all"])
@pytest.mark.parametrize("length", [20, 300])  # of the second more than are taken at a time
def test_soft_capped_scores_are_those_of_autograd(masked, length):
    import torch

    from mpitrain.kernels import attention_tiles as tiles
    from mpitrain.kernels.attention import AttentionRequest

    q, k, v, grad = random_tile(torch.float64, length, length)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    visible = masks(length, length)[1] if masked == "mask" else None
    seen = {"causal": causal, "mask": visible, "all": torch.ones_like(causal)}[masked]
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    kv = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:]]
    scores = 0.7 * torch.tanh(leaves[0] @ kv[0].mT * q.shape[-1] ** -0.5 / 0.7)
    shares = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)  # a query may see nothing
    expected = shares @ kv[1]
    expected.backward(grad)
    request = AttentionRequest(soft_cap=0.7)
    out, lse = tiles.attend(q, k, v, masked == "causal", visible, request)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    lse = lse.clamp(min=-50.0)
    found = tiles.attend_backward(grad, q, k, v, out, lse, masked == "causal", visible, request)
    for each, leaf in zip(found, leaves):
        torch.testing.assert_close(each, leaf.grad, rtol=1e-10, atol=1e-12)


def test_a_tile_takes_any_strides():
    """A gradient that was expanded, and queries, keys and values whose last dim isn't dense.

    torch's own op misreads them.
    """
    import torch

    from mpitrain.kernels import attention_products as products
    from mpitrain.kernels import attention_tiles as tiles

    q, k, v, _ = (x.mT.contiguous().mT for x in random_tile(torch.float64, 20, 20))
    grad = torch.ones(1, 1, 1, 1, dtype=torch.float64).expand(q.shape)
    out, lse = tiles.attend(q, k, v, True)
    torch.testing.assert_close(out, products.attend_by_products(q, k, v, True)[0], rtol=1e-12, atol=1e-12)
    expected = products.attend_backward_by_products(grad, q, k, v, out, lse, True)
    for found, wanted in zip(tiles.attend_backward(grad, q, k, v, out, lse, True), expected):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_tile_on_a_cuda_device_equals_the_same_on_the_host(dtype, masked):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from mpitrain.kernels import attention_tiles as tiles

    budget = {"float64": 1e-10, "float32": 1e-3, "bfloat16": 3e-2}[dtype]
    on_host = random_tile(torch.float64, 20, 20)
    on_device = [x.to("cuda", getattr(torch, dtype)) for x in on_host]
    visible = masks(20, 20)[masked]
    there = None if visible is None else visible.cuda()
    out, lse = tiles.attend(*on_host[:3], not masked, visible)
    found, found_lse = tiles.attend(*on_device[:3], not masked, there)
    torch.testing.assert_close(found.cpu().double(), out, rtol=budget, atol=budget)
    torch.testing.assert_close(found_lse.cpu().double(), lse, rtol=budget, atol=budget)
    lse = lse.clamp(min=-50.0)
    found_lse = found_lse.clamp(min=-50.0)
    expected = tiles.attend_backward(on_host[3], *on_host[:3], out, lse, not masked, visible)
    grads = tiles.attend_backward(on_device[3], *on_device[:3], found, found_lse, not masked, there)
    for x, wanted in zip(grads, expected):
        torch.testing.assert_close(x.cpu().double(), wanted, rtol=budget, atol=budget)


def documents_of(lengths):
    """Return the document of each position, and the keys that each sees."""
    documents = np.repeat(np.arange(len(lengths)), lengths)
    return documents, np.concatenate([np.arange(1, length + 1) for length in lengths])


@pytest.mark.parametrize("size", [2, 3, 8])
def test_chunks_have_equal_shares_of_long_documents_and_ranks_equal_work(size, monkeypatch):
    monkeypatch.setattr(sequence, "LEAST_SHARE", 4)
    dice = np.random.default_rng(size)
    length = 256 * size
    placement = SequencePlacement("zigzag", length, size)
    for _ in range(50):
        cuts = np.sort(dice.choice(np.arange(1, length), dice.integers(1, 12), replace=False))
        lengths = np.diff(cuts, prepend=0, append=length)
        documents, sees = documents_of(lengths)
        order = placement.order(documents)
        assert sorted(order) == list(range(length))
        chunk = np.arange(length) // (length // (2 * size))
        for number, count in enumerate(lengths):
            here = documents[order] == number
            assert (np.diff(order[here]) > 0).all()  # causality of the row is that of the document
            shares = np.bincount(chunk[here], minlength=2 * size)
            assert count < 8 * size or np.ptp(shares) <= 1
            # of a chunk the positions of a document are side by side
            assert (np.diff(np.flatnonzero(here))[np.diff(chunk[here]) == 0] == 1).all()
        work = [sees[order[placement.positions(rank)]].sum() for rank in range(size)]
        assert max(work) < 1.1 * np.mean(work)


def test_rows_without_a_long_document_stay_in_order():
    placement = SequencePlacement("zigzag", 8 * sequence.LEAST_SHARE, 2)
    documents, _ = documents_of([4 * sequence.LEAST_SHARE - 1, 1, 4 * sequence.LEAST_SHARE - 1, 1])
    assert (placement.order(documents) == np.arange(8 * sequence.LEAST_SHARE)).all()
    assert not SequencePlacement("zigzag", 4 * sequence.LEAST_SHARE - 4, 2).divides_documents
    assert not SequencePlacement("plain", 8 * sequence.LEAST_SHARE, 2).divides_documents

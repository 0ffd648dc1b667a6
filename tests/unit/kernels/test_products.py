"""Products of weights: right in every shape and type, and by oneDNN exactly where it was found to
be faster.
"""

import pytest

OP = "mkldnn::_linear_pointwise"


def called(x, weight):
    """Return the product, and the names of the operations that made it."""
    from torch.profiler import ProfilerActivity, profile

    from mpitrain.kernels.products import product

    with profile(activities=[ProfilerActivity.CPU]) as record:
        y = product(x, weight)
    return y, {event.key for event in record.key_averages()}


@pytest.mark.parametrize("rows", [(1,), (3,), (2, 33), (2, 128), (0,), (2, 0)])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 640), (384, 384), (1024, 100)])
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_product_is_that_of_fp64(rows, height, width, name, transposed):
    import torch

    torch.manual_seed(1)
    x = torch.randn(*rows, width)
    weight = torch.randn(*((width, height) if transposed else (height, width)))
    x, weight = (each.to(getattr(torch, name)) for each in (x, weight))
    weight = weight.t() if transposed else weight
    y, _ = called(x, weight)
    expected = x.double() @ weight.double().t()
    assert y.dtype == x.dtype and y.shape == expected.shape
    bound = {"float32": 2e-6, "float64": 1e-14, "bfloat16": 8e-3}[name] * width**0.5 * 4
    assert not y.numel() or (y.double() - expected).abs().max() <= bound


@pytest.fixture
def mkl_is(monkeypatch):
    """Make this processor one on which MKL is fast, or one on which it is slow."""
    from mpitrain.kernels import products

    if products.ONEDNN is None:
        pytest.skip("this torch has no oneDNN")
    return lambda speed: monkeypatch.setattr(products, "mkl_is_slow", lambda: speed == "slow")


@pytest.mark.parametrize(("rows", "height", "width", "by_onednn"), [
    (256, 384, 384, ("fast", "slow")),
    (256, 4096, 384, ("fast", "slow")),
    (33, 1024, 1024, ("fast", "slow")),
    (32, 1024, 1024, ("slow",)),  # few rows: packing the weight costs more than it gains
    (5, 1024, 1024, ("slow",)),
    (4, 1024, 1024, ()),
    (256, 128, 64, ("slow",)),
    (64, 64, 64, ()),  # few products: so does the call
])  # fmt: skip
@pytest.mark.parametrize("speed", ["fast", "slow"])
def test_onednn_multiplies_where_it_is_faster(rows, height, width, by_onednn, speed, mkl_is):
    import torch

    mkl_is(speed)
    for transposed in (False, True):
        weight = torch.randn(width, height).t() if transposed else torch.randn(height, width)
        assert (OP in called(torch.randn(rows, width), weight)[1]) == (speed in by_onednn)
    assert OP not in called(torch.randn(rows, width).double(), weight.double())[1]


@pytest.mark.parametrize("speed", ["fast", "slow"])
def test_one_row_of_a_token_that_is_generated_is_onednns_where_mkl_is_slow(speed, mkl_is):
    import torch

    mkl_is(speed)
    x = torch.randn(1, 1, 1024)
    large, small = torch.randn(1024, 1024), torch.randn(256, 1024)
    assert (OP in called(x, large)[1]) == (speed == "slow")
    assert OP not in called(x, small)[1] and OP not in called(x, large.t())[1]


@pytest.mark.parametrize("speed", ["fast", "slow"])
def test_onednn_is_given_no_weight_with_gaps(speed, mkl_is):
    """It takes a second for what is otherwise done in half a millisecond (torch 2.13)."""
    import torch

    from mpitrain.kernels import products

    mkl_is(speed)
    wide = torch.randn(384, 400)
    x = torch.randn(256, 384)
    assert (
        OP in called(x, wide[:, :384].contiguous())[1]
        and OP in called(x, wide[:, :384].t().contiguous().t())[1]
    )
    assert OP not in called(x, wide[:, :384])[1] and OP not in called(x, wide[:, :384].t())[1]
    assert not products._added_apart(x, torch.randn(256, 400)[:, :384])


@pytest.mark.parametrize(
    ("rows", "height", "width", "apart"),
    [(256, 384, 384, True), (256, 128, 64, False), (256, 4, 4096, False)],
)
@pytest.mark.parametrize("speed", ["fast", "slow"])
@pytest.mark.parametrize("at_once", [2**22, 40000])
def test_weight_gradients_are_made_apart_where_mkl_is_slow(
    rows, height, width, apart, speed, at_once, mkl_is, monkeypatch
):
    """Some rows of the weight at a time, of which the last are fewer."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from mpitrain.kernels import products

    mkl_is(speed)
    monkeypatch.setattr(products, "ADDED_AT_ONCE", at_once)
    torch.manual_seed(1)
    total = torch.randn(height, width)
    a = torch.randn(rows, height)
    b = torch.randn(rows, width)
    expected = total.double() + a.double().t() @ b.double()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        products.add_product(total, a, b)
    names = [event.name for event in record.events()]
    pieces = -(-height // (at_once // width)) if apart and speed == "slow" else 0
    assert names.count(OP) == pieces and ("aten::addmm_" in names) == (pieces == 0)
    assert (total.double() - expected).abs().max() < 2e-4


def test_a_rounded_product_is_that_of_its_factors_type():
    import torch

    from mpitrain.kernels.products import add_product

    torch.manual_seed(1)
    total = torch.randn(5, 9)
    a = torch.randn(70, 5).bfloat16()
    b = torch.randn(70, 9).bfloat16()
    expected = a.double().t() @ b.double()
    exact = total.clone()
    rounded = total.clone()
    add_product(exact, a, b)
    add_product(rounded, a, b, rounded=True)
    assert (exact - total - expected).abs().max() < 1e-5
    error = ((rounded - total - expected) / expected).abs().max()
    assert 2**-10 < error < 2**-7  # half a unit in the last place of bf16, but not less
    assert torch.equal(rounded, total + (a.t() @ b))


@pytest.mark.parametrize("names", [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float64")])
def test_gradients_are_added_in_the_wider_type(names):
    import torch

    from mpitrain.kernels.products import add_product

    torch.manual_seed(1)
    total_type, type_ = (getattr(torch, name) for name in names)
    total = torch.randn(5, 9, dtype=total_type)
    a = torch.randn(70, 5).to(type_)
    b = torch.randn(70, 9).to(type_)
    expected = total.double() + a.double().t() @ b.double()
    add_product(total, a, b)
    assert total.dtype == total_type and (total.double() - expected).abs().max() < 1e-4

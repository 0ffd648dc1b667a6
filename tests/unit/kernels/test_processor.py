"""In which type a CPU multiplies 16-bit matrices: by what it is, and right either way."""

import pytest
import torch

from mpitrain.config import Precision
from mpitrain.kernels import attention_cpu_16bit, grouped, precision, processor, products
from mpitrain.kernels.attention import PLAIN
from mpitrain.model import attention_functions
from mpitrain.plan.declared import probabilities

AVX512 = {"architecture": "x86_64", "avx2": True, "avx512_f": True}
SAPPHIRE_RAPIDS = AVX512 | {
    "cpu_name": "Intel Xeon",
    "avx512_bf16": True,
    "avx512_fp16": True,
    "amx_bf16": True,
}
PROCESSORS = {  # what torch says of them: which 16-bit types are fast
    "Intel Sapphire Rapids": (SAPPHIRE_RAPIDS, {"bf16", "fp16"}),
    "the same, AMX hidden": (SAPPHIRE_RAPIDS | {"amx_bf16": False}, {"fp16"}),
    "Intel Cooper Lake": (AVX512 | {"cpu_name": "Intel Xeon", "avx512_bf16": True}, {"bf16"}),
    "Intel Ice Lake": (AVX512 | {"cpu_name": "Intel Xeon"}, set()),
    "AMD Zen 4": (AVX512 | {"cpu_name": "AMD EPYC", "avx512_bf16": True}, {"bf16"}),
    "AMD, with fp16": (
        AVX512 | {"cpu_name": "AMD EPYC", "avx512_bf16": True, "avx512_fp16": True},
        {"bf16", "fp16"},
    ),
    "a laptop": ({"architecture": "x86_64", "cpu_name": "Intel Core", "avx2": True}, set()),
    "Arm Neoverse V1": (
        {"architecture": "aarch64", "neon": True, "bf16": True, "fp16_arith": True},
        {"bf16", "fp16"},
    ),
    "Arm Neoverse N1": (
        {"architecture": "aarch64", "neon": True, "bf16": False, "fp16_arith": True},
        {"fp16"},
    ),
    "one without a name": (AVX512, set()),
    "nothing known": ({}, set()),
}


@pytest.fixture(params=["as it is", "in fp32"])
def way(request, monkeypatch):
    """Make this processor one that is fast in 16 bits, or one that isn't."""
    fast = {torch.bfloat16, torch.float16} if request.param == "as it is" else set()
    monkeypatch.setattr(processor, "_fast_here", lambda: frozenset(fast))
    return request.param


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_is_known_by_its_instructions(name):
    has, fast = PROCESSORS[name]
    assert {
        precision_name
        for precision_name in ("bf16", "fp16")
        if precision.TYPES[precision_name] in processor.fast_types(has)
    } == fast


@pytest.mark.parametrize("name", PROCESSORS)
def test_mkl_is_slow_on_amd(name):
    assert processor.slow_by_mkl(PROCESSORS[name][0]) == name.startswith("AMD")


def test_mkl_is_slow_where_there_is_something_else():
    there = torch.backends.mkldnn.is_available()
    assert processor.mkl_is_slow() == (there and processor.slow_by_mkl(torch.cpu.get_capabilities()))


def test_only_16_bits_are_widened(way):
    wide = torch.float32 if way == "in fp32" else None
    types = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    assert [processor.multiplied_as(each) for each in types] == [
        wide or torch.bfloat16,
        wide or torch.float16,
        *types[2:],
    ]


def test_this_processor_is_asked_once():
    assert processor._fast_here() == processor.fast_types(torch.cpu.get_capabilities())


@pytest.mark.parametrize(
    ("slow", "by"), [(True, "oneDNN, as MKL is slow here"), (False, "oneDNN where products are large")]
)
def test_doctor_says_it(way, slow, by, monkeypatch):
    monkeypatch.setattr(processor, "mkl_is_slow", lambda: slow)
    said = "as it is" if way == "as it is" else "in fp32, which is faster here"
    assert processor.in_words() == f"bf16 {said}, fp16 {said}, fp32 by {by}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("height", "width"), [(5, 7), (300, 200), (1, 1), (64, 0), (0, 64)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [(2, 33), (1, 1)])
@pytest.mark.parametrize("tile", [2**10, 32])
def test_a_product_is_that_of_fp64_rounded(way, dtype, height, width, transposed, rows, tile, monkeypatch):
    """Also in tiles, of which the last are smaller."""
    monkeypatch.setattr(products, "TILE", tile)
    torch.manual_seed(1)
    x = torch.randn(*rows, width).to(dtype)
    weight = torch.randn(*((width, height) if transposed else (height, width))).to(dtype)
    weight = weight.t() if transposed else weight
    y = products.product(x, weight)
    exact = x.double() @ weight.double().t()
    assert y.dtype == dtype and y.shape == exact.shape
    unit = torch.finfo(dtype).eps
    assert ((y.double() - exact).abs() <= exact.abs() * unit + unit * 1e-2).all()


def test_a_widened_product_is_rounded_once(monkeypatch):
    monkeypatch.setattr(processor, "_fast_here", frozenset)
    torch.manual_seed(1)
    x = torch.randn(33, 20).bfloat16()
    weight = torch.randn(9, 20).bfloat16()
    assert products.product(x, weight).equal(products.product(x.float(), weight.float()).bfloat16())


@pytest.mark.parametrize("shape", [(700, 90, 3000), (3000, 400, 90), (90, 5000, 700), (1, 1, 1)])
@pytest.mark.parametrize("first", [False, True])
def test_a_widened_gradient_is_that_of_fp64_and_its_tiles_are_small(monkeypatch, shape, first):
    """Some rows, inputs and outputs at a time; the product of each tile is exact to fp32."""
    monkeypatch.setattr(processor, "_fast_here", frozenset)
    monkeypatch.setattr(products, "TILE", 2**8)
    tiles = factors_of(monkeypatch, "add_product")
    torch.manual_seed(1)
    rows, height, width = shape
    a, b = torch.randn(rows, height).bfloat16(), torch.randn(rows, width).bfloat16()
    total = torch.randn(height, width)
    expected = a.double().t() @ b.double() + (0 if first else total.double())
    products.add_product(total, a, b, first=first)
    assert (total.double() - expected).abs().max() < 1e-5 * rows
    assert max(each.numel() for tile in tiles for each in tile) <= 2**16


@pytest.mark.parametrize("shape", [(700, 90, 3000), (3000, 400, 90), (90, 5000, 700)])
def test_what_a_product_widens_at_a_time_is_small(monkeypatch, shape):
    monkeypatch.setattr(processor, "_fast_here", frozenset)
    monkeypatch.setattr(products, "TILE", 2**8)
    tiles = factors_of(monkeypatch, "product")
    rows, width, height = shape
    x, weight = torch.randn(rows, width).half(), torch.randn(height, width).half()
    y = products.product(x, weight)
    assert max(each.numel() for tile in tiles for each in tile) <= 2**16
    exact = x.double() @ weight.double().t()
    assert ((y.double() - exact).abs() <= torch.finfo(y.dtype).eps * (exact.abs() + 0.1)).all()


def factors_of(monkeypatch, name):
    """Return a list that grows by the fp32 factors of each call of products.`name` from within."""
    found = []
    inner = getattr(products, name)

    def noted(*arguments, **options):
        factors = [each for each in arguments[-2:] if isinstance(each, torch.Tensor)]
        if all(each.dtype == torch.float32 for each in factors):
            found.append(factors)
        return inner(*arguments, **options)

    monkeypatch.setattr(products, name, noted)
    return found


def test_one_row_of_bf16_widens_no_weight(monkeypatch):
    monkeypatch.setattr(processor, "_fast_here", frozenset)
    monkeypatch.setattr(products, "_widened_product", lambda x, weight: "widened")
    weight = torch.randn(9, 20).bfloat16()
    row, rows = torch.randn(1, 20).bfloat16(), torch.randn(2, 20).bfloat16()
    assert isinstance(products.product(row, weight), torch.Tensor)
    for x, other in ((rows, weight), (row.half(), weight.half()), (row, weight.t().contiguous().t())):
        assert products.product(x, other) == "widened"


def test_a_rounded_weight_gradient_is_one_either_way(way):
    torch.manual_seed(1)
    a = torch.randn(70, 5).bfloat16()
    b = torch.randn(70, 9).bfloat16()
    total = torch.randn(5, 9)
    added = total.clone()
    products.add_product(added, a, b, rounded=True)
    # of bf16, but for the sum
    assert (added - total).sub((added - total).bfloat16().float()).abs().max() < 1e-6
    assert ((added - total) - (a.double().t() @ b.double())).abs().max() < 70**0.5 * 2**-7


@pytest.mark.parametrize(("asked", "compute", "rounded"), [
    # fp32 sums cost nothing where it is multiplied in fp32
    ("auto", "bf16", {"as it is": True, "in fp32": False}),
    ("rounded", "bf16", {"as it is": True, "in fp32": True}),
    ("fp32", "bf16", {"as it is": False, "in fp32": False}),
    ("auto", "fp16", {"as it is": False, "in fp32": False}),
    ("auto", "fp32", {"as it is": False, "in fp32": False}),
])  # fmt: skip
def test_products_are_rounded_where_that_is_faster(way, asked, compute, rounded):
    assert (
        precision.rounds_products(Precision(compute=compute, products=asked), torch.device("cpu"))
        == rounded[way]
    )
    assert precision.rounds_products(Precision(compute=compute, products=asked), torch.device("cuda")) == (
        asked == "rounded"
    )


def test_groups_are_multiplied_alike(way):
    torch.manual_seed(1)
    x = torch.randn(70, 64).bfloat16()
    weights = torch.randn(3, 32, 64).bfloat16()
    sizes = (30, 0, 40)
    y = grouped.grouped_product(x, weights, sizes)
    exact = torch.cat([rows.double() @ weight.double().t() for rows, weight in zip(x.split(sizes), weights)])
    assert grouped._in_few_shapes(x) and not grouped._at_once(x, weights)
    assert y.dtype == torch.bfloat16 and ((y.double() - exact).abs() <= exact.abs() * 2**-7 + 1e-2).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_attention_is_that_of_fp64(way, dtype, masked, keep):
    torch.manual_seed(1)
    q, grad, k, v = (torch.randn(2, 130, heads, 16).to(dtype).transpose(1, 2) for heads in (4, 4, 2, 2))
    hidden = torch.ones(130, 130, dtype=torch.bool).triu(1)
    mask = torch.zeros(130, 130, dtype=dtype).masked_fill(hidden, -torch.inf) if masked else None
    out, kept = attention_cpu_16bit.attend(q, k, v, mask, keep)
    found = [out, *attention_cpu_16bit.attend_backward(grad, q, k, v, mask, kept)]
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    for a, b in zip(found, [exact, *torch.autograd.grad(exact, leaves, grad.double())], strict=True):
        assert a.dtype == dtype and (a - b).norm() <= b.norm() * (0.003 if way == "in fp32" else 0.01)


SHORT = [(1, 4, 2, 16, 16), (3, 4, 4, 64, 16), (1, 8, 2, 130, 64), (2, 3, 1, 512, 256)]
LONGER = [(3, 4, 4, 65, 16), (1, 2, 1, 513, 256)]


@pytest.mark.parametrize("shape", SHORT + LONGER, ids=str)
def test_probabilities_of_short_sequences_are_kept_as_planned(way, shape):
    batch, heads, kv_heads, length, width = shape
    q, k, v = (
        torch.randn(batch, n, length, width).bfloat16().requires_grad_() for n in (heads, kv_heads, kv_heads)
    )
    kept = shape in SHORT
    assert kept == probabilities.are_kept(length, width) == attention_cpu_16bit.keeps(q, None)
    assert not any(attention_cpu_16bit.keeps(q.to(dtype), None) for dtype in (torch.float32, torch.float16))
    assert not attention_cpu_16bit.keeps(q, torch.zeros(length, length))
    for selective_, expected in ((False, batch * heads * probabilities.count(length) * 2), (True, 0)):
        made, _ = attention_functions.attention(q, k, v, PLAIN, again=False, selective=selective_)
        saved = made.grad_fn.saved_tensors
        own = {x.data_ptr() for x in (q, k, v)}
        assert sum(x.nbytes for x in saved if x is not None and x.data_ptr() not in own) == (
            expected if kept else 0
        )


def test_fp16_attends_piece_by_piece_where_it_is_widened(way):
    q, k, v = (torch.randn(1, 200, heads, 16).transpose(1, 2) for heads in (4, 2, 2))
    assert [
        attention_cpu_16bit.fits(q.to(dtype)) for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ] == [True, way == "in fp32", False]
    assert not attention_cpu_16bit.fits(q.half().to("meta"))
    halves = q.half(), k.half(), v.half()
    out, _ = attention_functions.attention(*halves, PLAIN, again=False, selective=False)
    assert torch.equal(out, attention_cpu_16bit.attend(*halves)[0]) == (way == "in fp32")

"""The functions between products, as they are and compiled, against plain torch in fp64, and what
compiling needs.

MPITRAIN_EFFORT=all takes fp64 and fp16, too.
"""

import os
import re
from dataclasses import fields, replace

import pytest
import torch
from conftest import EVERY, LONG
from torch.nn import functional

from mpitrain.errors import ConfigError
from mpitrain.kernels import compiled as compiling
from mpitrain.kernels import functions
from mpitrain.kernels.compiled import Fused
from mpitrain.kernels.functions import EAGER
from mpitrain.kernels.precision import wide
from mpitrain.training.machine import compiler
from mpitrain.training.machine.compiler import missing, require

# each takes ten seconds to compile
KINDS = (torch.float32, torch.bfloat16, *(torch.float64, torch.float16) * EVERY)
MOST_OFF = 16  # units in the last place
# no multiples of a vector register
EPS = 1e-5
WIDTH = 44
HEADS = 3
VOCAB = 91


def log_sums_on_a_device(logits_NV):
    return functions._log_sums_on_a_device(
        logits_NV, logits_NV.new_empty(len(logits_NV), dtype=wide(logits_NV.dtype))
    )


# a GPU's; here a CPU computes them
ON_A_DEVICE = replace(EAGER, log_sums=log_sums_on_a_device, to_gradients=functions._to_gradients_on_a_device)


@pytest.fixture(scope="module")
def fused():
    """The functions compiled; each shape and type of this file is compiled once."""
    return compiling.compiled(deterministic=True)


def tensors(kind):
    """Return a maker of random tensors of a type."""
    dice = torch.Generator().manual_seed(1)
    return lambda *shape, kind=kind: torch.randn(*shape, generator=dice).to(kind)


def exact(*tensors):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in tensors]


def normed(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def silu_times(gate, up):
    return functional.silu(gate) * up


def turned(x, cos, sin, sense):
    """Of complex numbers, (a + bi) (cos + i sin) or its conjugate."""
    a, b = x.chunk(2, -1)
    y = torch.complex(a, b) * torch.complex(cos, sense * sin)
    return torch.cat((y.real, y.imag), -1)


def grads(function, inputs, grad):
    leaves = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad)


def calls(kind):
    """Yield the name of each function, what it is called with, and what plain torch makes of that in fp64."""
    make = tensors(kind)
    statistics = wide(kind)
    x = make(2, 5, WIDTH)
    weight = 1 + make(WIDTH) / 4
    grad = make(2, 5, WIDTH)
    _, unit, scale = EAGER.norm(x, weight, EPS)
    twice = normed(*exact(x, weight)), normed(x.double(), 1)
    yield "norm", (x, weight, EPS), (*twice, (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt())
    yield "norm_again", (x, weight, scale), twice
    yield "norm_backward", (grad, weight, unit, scale), grads(normed, exact(x, weight), grad.double())
    gate = 3 * make(7, WIDTH)
    up = make(7, WIDTH)
    yield "gated", (gate, up), (silu_times(*exact(gate, up)),)
    yield "gated_backward", (up, gate, up, None), grads(silu_times, exact(gate, up), up.double())
    heads = make(2, 5, HEADS, WIDTH)
    angles = make(5, WIDTH // 2, kind=statistics)
    for sense, each in ((1, heads.transpose(1, 2)), (-1, heads.transpose(1, 2).contiguous())):
        arguments = each, angles.cos(), angles.sin(), sense
        yield "turned", arguments, (turned(*exact(*arguments)),)
    logits = 4 * make(7, VOCAB)
    targets = torch.arange(7) * 13
    here = torch.arange(7) != 2
    factor = 1 + make(7, kind=statistics) / 4
    sums = torch.logsumexp(logits.double(), -1)
    yield "log_sums", (logits,), (sums,)
    ones = functional.one_hot(targets, VOCAB) * here[:, None]
    yield (
        "to_gradients",
        (logits, sums.to(statistics), targets, here, factor),
        ((logits.double().softmax(-1) - ones) * factor[:, None],),
    )


def called(given, name, arguments):
    """Return what a function gives, and what it writes: logits become gradients in place."""
    arguments = [
        x.clone() if name == "to_gradients" and isinstance(x, torch.Tensor) else x for x in arguments
    ]
    found = getattr(given, name)(*arguments)
    found = arguments[0] if name == "to_gradients" else found
    return found if isinstance(found, tuple) else (found,)


@LONG
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_all_forms_are_plain_torch_in_fp64_but_for_rounding(fused, kind):
    forms = ("as it is", EAGER), ("on a device", ON_A_DEVICE), ("compiled", fused)
    for name, arguments, expected in calls(kind):
        for form, given in forms:
            for found, wanted in zip(called(given, name, arguments), expected):
                error = ((found.double() - wanted).abs() / (wanted.abs() + wanted.abs().mean())).max().item()
                message = f"{name} {form}: {error / torch.finfo(kind).eps:.1f} units in the last place"
                assert error < MOST_OFF * torch.finfo(kind).eps, message
                assert found.dtype == (wide(kind) if found.shape[-1] == 1 or name == "log_sums" else kind), (
                    name
                )


def test_every_function_is_compared_with_plain_torch():
    """But for what rounds a tensor: tests/unit/kernels/test_model_fp8.py asks for its bits."""
    others = {"keep_activated", "activation", "quantise"}
    assert {name for name, *_ in calls(torch.float32)} == {field.name for field in fields(EAGER)} - others


@LONG
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_made_again_has_the_same_bits(fused, kind):
    """And so has what is computed of others' gradients.

    `requires_grad`, and being called twice, change nothing.
    """
    x = tensors(kind)(2, 5, WIDTH)
    weight = tensors(kind)(WIDTH)
    for given in (EAGER, fused):
        y, unit, scale = given.norm(x, weight, EPS)
        assert all(map(torch.equal, given.norm_again(x, weight, scale), (y, unit)))
        with torch.no_grad():
            assert torch.equal(given.norm(x.clone().requires_grad_(), weight, EPS)[0], y)


@LONG
def test_a_row_has_the_same_bits_whatever_the_others_are(fused):
    """A microbatch of one step is a microbatch of another."""
    x = tensors(torch.float32)(2, 5, WIDTH)
    weight = tensors(torch.float32)(WIDTH)
    first = fused.norm(x, weight, EPS)[0]
    assert torch.equal(fused.norm(torch.cat((x[:1], 2 * x[1:])), weight, EPS)[0][0], first[0])


@LONG
def test_heads_stay_side_by_side_in_memory(fused):
    x = torch.randn(2, HEADS, 5, WIDTH)
    table = torch.ones(5, WIDTH // 2)
    assert (
        fused.turned(x.transpose(1, 2).contiguous().transpose(1, 2), table, table, 1)
        .transpose(1, 2)
        .is_contiguous()
    )


@LONG
def test_each_shape_is_compiled_once_and_none_is_left_as_it_is(monkeypatch):
    """torch itself gives up on a function that has met some shapes, and compiles once more where a
    gradient is asked for.
    """
    made = []
    make = Fused._make
    monkeypatch.setattr(
        Fused, "_make", lambda fused, arguments: made.append(arguments) or make(fused, arguments)
    )
    log_sums = Fused(compiling._log_sums, deterministic=True)
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in (1, 2, 3, 1, 2, 3):
            assert torch.equal(log_sums(torch.zeros(length, 1)), torch.zeros(length))
    with torch.no_grad():
        log_sums(torch.zeros(3, 1, requires_grad=True))
    assert len(made) == 3


# ---------------------------------------------------------------- what it needs


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_is_there_will_do(monkeypatch):
    require(None, os.environ)
    assert "found no Triton" in missing("cuda") or missing("cuda") == ""
    monkeypatch.setattr(compiler, "find_spec", lambda name: name)
    assert missing("cuda") == ""


@pytest.mark.parametrize(
    ("vendor", "environment", "message"),
    [
        (
            None,
            {"PATH": ""},
            r"found no C\+\+ compiler \(.*\) on .*; needed one, by torch.compile; install it, name another "
            r"by CXX,",
        ),
        (None, {"CXX": "/nonexistent"}, r"found no C\+\+ compiler \(/nonexistent\)"),
        (None, {"CXX": "{}/fails"}, r"can't read Python.h .* says: no such header"),
        (None, {"CXX": "{}/foreign"}, r"found a C\+\+ compiler that doesn't run"),
        (
            "cuda",
            {"PATH": ""},
            r"found no C compiler \(gcc, clang, cc\) on .*; needed one, by Triton; install it,",
        ),
        ("cuda", {"CC": "{}/fails"}, r"found a C compiler that can't read Python.h .* says: no such header"),
    ],
)
def test_what_is_missing_is_named(monkeypatch, tmp_path, vendor, environment, message):
    monkeypatch.setattr(compiler, "find_spec", lambda name: name)  # as if Triton were installed
    script(tmp_path / "fails", "echo no such header >&2; exit 1")
    (tmp_path / "foreign").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "foreign").chmod(0o755)
    environment = {"PATH": os.environ["PATH"], **environment}
    environment = {name: value.format(tmp_path) for name, value in environment.items()}
    with pytest.raises(ConfigError, match=f"run.compile = true: .*{message}"):
        require(vendor, environment)
    if vendor:
        assert re.match(f"not compiled, and slower for it: {message}", missing(vendor, environment))

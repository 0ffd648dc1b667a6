"""What products lose that are small: how large a CPU's tiles are, by what `bench machine` measures."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from public_models import public_model

from mpitrain.plan.declared import work
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time import step
from mpitrain.plan.predict.step_time.compute import product_seconds
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.plan.predict.step_time.tiles import (
    LARGE,
    MOST,
    OF_CPU,
    OF_GPU,
    SMALL,
    Tiles,
    fitted,
    share_of,
    share_of_all,
    stated,
)

LAPTOP = find_machine("laptop")
SHAPE = public_model("llama3-8b", layers=8, width=512, heads=8, kv_heads=4, ffn=1408, vocab=512)


def rates_of(rate, side):
    """Return what `bench machine` says of a CPU's large products, and of small ones."""
    return [
        rate * share_of_all(each, Tiles(side, side)) / share_of_all(each, OF_CPU) for each in (LARGE, SMALL)
    ]


@given(st.floats(1e9, 1e13), st.floats(0.0, MOST))
def test_rate_and_tiles_are_those_by_which_products_take_what_was_measured(rate, side):
    large, small = rates_of(rate, side)
    found, tiles = fitted(large, small)
    assert found == pytest.approx(rate, rel=1e-6)
    assert (tiles.rows, tiles.depth) == pytest.approx((side, side), abs=1e-6)
    assert stated(found, tiles) == pytest.approx(large)


def test_small_products_that_are_no_slower_have_no_tiles():
    rate, tiles = fitted(1e11, 2e11)
    assert tiles.rows == pytest.approx(0, abs=1e-6) and rate == pytest.approx(
        1e11 * share_of_all(LARGE, OF_CPU)
    )


def test_products_take_the_sum_of_what_each_takes():
    took = sum(m * n * k / share_of(m, n, k, OF_GPU) for m, k, n in LARGE)
    assert share_of_all(LARGE, OF_GPU) == pytest.approx(sum(m * n * k for m, k, n in LARGE) / took)


def machine_with(side, rate=6e10):
    """Return the rates of a laptop of which large and small products were measured."""
    figure = LAPTOP.products["fp32"]
    measured = zip(("fp32", "fp32_small"), rates_of(rate, side))
    products = {
        name: msgspec.structs.replace(figure, peak=found, sustained=found) for name, found in measured
    }
    return machine_of(msgspec.structs.replace(LAPTOP, products=products))


def test_a_machine_with_both_rates_has_the_tiles_of_its_products():
    found = machine_with(40)
    assert found.products == {"fp32": pytest.approx(6e10)} and found.tiles["fp32"].rows == pytest.approx(40)
    assert "fp32_small" not in found.peaks
    product = work.Product(128, 128, 128)
    expected = product.flops / 6e10 * (168 / 128) ** 3 + found.launch_s
    assert product_seconds(product, found, "fp32") == pytest.approx(expected)
    assert not machine_of(LAPTOP).tiles


def predicted(machine, **layout):
    given = dict(ranks=2, sequence=256, batch=16, micro=2, compute="fp32", fused=False)
    return step.predict_step(SHAPE, StepLayout(**given | layout), machine)


def seconds_of(machine, **layout):
    return predicted(machine, **layout).seconds


def test_what_tensor_parallelism_makes_small_takes_longer_the_larger_the_tiles():
    smaller, larger = (
        predicted(machine_with(side), tp=2).computing / predicted(machine_with(side)).computing
        for side in (12, 50)
    )
    assert larger > 1.005 * smaller


def test_pieces_of_async_tp_take_longer_on_a_cpu_and_not_on_a_gpu():
    cpu, gpu = machine_with(40)._replace(cores_per_node=2), machine_of(find_machine("h100-80gb"))
    assert 1.05 < seconds_of(cpu, tp=2, tp_overlap=0.5) / seconds_of(cpu, tp=2) < 1.3
    assert seconds_of(cpu, tp_overlap=0.5) == seconds_of(cpu)  # there are none
    assert seconds_of(gpu, tp=2, tp_overlap=0.5) < seconds_of(gpu, tp=2)

"""What memory.offload takes: copies to host memory and back, and an update there."""

import pytest
from public_models import public_model

from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time import step
from mpitrain.plan.predict.step_time.machine import HOST_COPY, HOST_UPDATE, find_machine, machine_of
from mpitrain.plan.predict.step_time.optimizer_seconds import update_seconds
from mpitrain.plan.predict.step_time.stage_seconds import most_weights, stash_bytes
from mpitrain.plan.predict.step_time.step_model import Piece, works_of

SHAPE = public_model("llama3.2-1b")
LAYOUT = StepLayout(1, 2048, 64, 4, zero=0, fused=True)
MEASURED = machine_of(find_machine("h100-measured"))
UNKNOWN = machine_of(find_machine("h100-80gb"))
CPU = machine_of(find_machine("laptop"))._replace(cores_per_node=1)
OWNED = sum(most_weights(SHAPE, LAYOUT))
BLOCK = Piece(0, 0, 2)
PLAY = 1 + step.STRAGGLERS


def took(machine, layout=LAYOUT, **changed):
    return step.predict_step(SHAPE, layout._replace(**changed), machine).seconds


def stashed(layout):
    """Return the bytes that one microbatch leaves in a block."""
    return stash_bytes(layout, works_of(SHAPE, layout, 1.0).of(BLOCK), SHAPE.sizes.width)


def test_an_update_in_host_memory_takes_what_was_measured():
    assert pytest.approx(1_235_814_400, rel=1e-5) == OWNED  # all but norms
    assert took(MEASURED, offload_optimizer=True) - took(MEASURED) == pytest.approx(2.914 - 2.037, rel=0.02)


@pytest.mark.parametrize(
    ("rates", "seconds"),
    [
        ({"host_update": 1e9, "host_copy": 1e15}, OWNED / 1e9),  # all that takes time is the update
        ({"host_update": 1e15, "host_copy": 5e10}, 6 * OWNED / 5e10),  # gradients there, weights back
        ({"host_update": 1e9, "host_copy": 1e9}, 6 * OWNED / 1e9),  # updated while others come
        ({"host_update": 1e9, "host_copy": 1e10}, OWNED / 1e9 + 2 * OWNED / 1e10),
    ],
)
def test_gradients_come_while_others_are_updated_and_weights_go_back_after_that(rates, seconds):
    found = update_seconds(SHAPE, LAYOUT._replace(offload_optimizer=True), MEASURED._replace(**rates))
    assert found == pytest.approx(seconds, rel=1e-3)
    shared = LAYOUT._replace(ranks=8, zero=1, offload_optimizer=True)
    assert update_seconds(SHAPE, shared, MEASURED._replace(**rates)) == pytest.approx(seconds / 8, rel=1e-3)


def test_activations_take_what_no_computation_hides():
    fast, slow = MEASURED._replace(host_copy=1e15), MEASURED._replace(host_copy=1e10)
    assert took(fast, offload_activations=True) == pytest.approx(took(fast), rel=1e-6)
    copied = 2 * 16 * SHAPE.sizes.layers * stashed(LAYOUT) / 1e10
    hidden = copied * PLAY + took(slow) - took(slow, offload_activations=True)
    assert 0 < hidden < took(slow), "blocks are computed meanwhile"


def test_a_cpu_copies_in_its_own_memory():
    layout = LAYOUT._replace(compute="fp32", fused=False)
    rate = CPU.memory_bandwidth
    update = took(CPU, layout, offload_optimizer=True) - took(CPU, layout)
    assert update == pytest.approx(PLAY * 16 * OWNED / rate, rel=1e-3)
    kept = 16 * SHAPE.sizes.layers * stashed(layout)
    activations = took(CPU, layout, offload_activations=True) - took(CPU, layout)
    assert activations == pytest.approx(PLAY * 4 * kept / rate, rel=1e-3)


def test_what_is_not_known_of_a_host_is_guessed():
    assert not UNKNOWN.knows_offload and MEASURED.knows_offload and CPU.knows_offload
    here, away = took(UNKNOWN), took(UNKNOWN, offload_optimizer=True)
    assert away - here == pytest.approx(PLAY * (OWNED / HOST_UPDATE + 2 * OWNED / HOST_COPY), rel=0.05)
    assert took(UNKNOWN, offload_activations=True) > here


def test_four_blocks_activations_stay_at_most():
    few, many = (
        step.predict_step(SHAPE, LAYOUT._replace(offload_activations=given), MEASURED).footprint
        for given in (True, False)
    )
    assert many.activations - few.activations == (SHAPE.sizes.layers - 4) * stashed(LAYOUT)


def test_a_layout_says_what_is_in_host_memory():
    both = LAYOUT._replace(offload_activations=True, offload_optimizer=True)
    assert " offload all " in both.describe() and "offload" not in LAYOUT.describe()

"""The scale of the loss under fp16: halved by an overflow, doubled after so many steps without one."""

from mpitrain.config import Precision
from mpitrain.optim.loss_scale import GROWTH, START, LossScale


def test_it_doubles_after_so_many_steps_without_an_overflow_and_counts_again():
    scale = LossScale(Precision(compute="fp16"))
    scale.update(skipped=True)
    assert scale.state == [START / 2, 0]
    for doubled in (START, 2 * START):
        for _ in range(GROWTH):
            assert scale.value == doubled / 2
            scale.update(skipped=False)
        assert scale.state == [doubled, 0]


def test_it_is_never_below_1():
    scale = LossScale(Precision(compute="fp16"))
    for _ in range(20):
        scale.update(skipped=True)
    assert scale.state == [1.0, 0]


def test_without_fp16_it_is_1():
    scale = LossScale(Precision(compute="bf16"))
    for step in range(2 * GROWTH):
        scale.update(skipped=step == 3)
    assert scale.state == [1.0, 0]

"""The loads of experts, gathered over ranks."""

from mpitrain.training.metrics_line import together


def test_loads_of_all_ranks_are_in_the_order_of_blocks():
    assert list(together([{"mtp.0": [1.0], "10": [1.0]}, {}, {"2": [1.0], "0": [1.0]}])) == [
        "0",
        "2",
        "10",
        "mtp.0",
    ]

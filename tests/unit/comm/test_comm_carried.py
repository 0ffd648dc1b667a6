"""What an axis is made of follows from what is started on it."""

import pytest

from mpitrain.comm.base.axis_operations import AUTO_SHARED, EVERYTHING, NOTHING, carried


@pytest.mark.parametrize(
    # the transports under which an axis of several ranks of one node needs them
    ("what", "second", "window"),
    [
        (NOTHING, "", ""),
        (EVERYTHING, "collectives", "auto shared"),
        (carried("send", "receive"), "", ""),
        (carried("shift", "all_to_all", "all_to_all_v", "barrier"), "", ""),
        (carried("all_reduce"), "collectives", "auto shared"),
        (carried("reduce_scatter", "all_gather"), "", "auto shared"),
        (carried("all_gather", most_bytes=AUTO_SHARED - 1), "", "shared"),
        (carried("all_gather", most_bytes=AUTO_SHARED), "", "auto shared"),
    ],
)
def test_second_communicators_and_windows_follow_from_operations_and_transport(what, second, window):
    transports = ("auto", "messages", "collectives", "shared")
    assert [t for t in transports if what.needs_second(t)] == second.split()
    assert [t for t in transports if what.needs_window(t)] == window.split()


def test_everything_is_every_operation():
    import inspect

    from mpitrain.comm import collectives

    functions = dict(inspect.getmembers(collectives, inspect.isfunction)).values()
    ours = {function.__name__ for function in functions if function.__module__ == collectives.__name__}
    assert EVERYTHING.operations == {name for name in ours if not name.startswith("_")} | {"send", "receive"}


def test_an_axis_of_one_rank_may_be_given_anything():
    assert (
        NOTHING.allows("all_reduce", 1)
        and not NOTHING.allows("all_reduce", 2)
        and carried("shift").allows("shift", 2)
    )

"""Two walks take turns at what they start: the order of everything, written down."""

from mpitrain.parallel.walk import WeightGradients, backward, run, run_together


class Travelling:
    def __init__(self, name, log):
        self.name = name
        self.log = log
        log.append(f"start {name}")

    def wait(self):
        self.log.append(f"wait {self.name}")


def walk(name, log, items):
    """Compute what is in small letters, start what is in capitals, and yield nothing at a dot."""
    for item in items:
        if item == ".":
            yield None
        elif item.isupper():
            yield Travelling(name + item, log)
        else:
            log.append(name + item)
    return name


def test_walks_that_send_nothing_take_turns_item_by_item():
    log = []
    assert run_together([walk("x", log, "a.b.c"), walk("y", log, "a.b.c")]) == ["x", "y"]
    assert log == ["xa", "ya", "xb", "yb", "xc", "yc"]


def test_a_walk_continues_while_the_other_ones_operation_travels():
    log = []
    polls = []
    run_together([walk("x", log, "aRb"), walk("y", log, "a.b.cSd")], lambda: polls.append(len(log)))
    assert log == ["xa", "start xR", "ya", "yb", "yc", "start yS", "wait xR", "xb", "wait yS", "yd"]
    assert {3, 4} <= set(polls)  # messages are moved on meanwhile


class TurnProduct:
    def __init__(self, log, name):
        self.log = log
        self.name = name

    def add(self):
        self.log.append(f"add {self.name}")


class TurnItem:
    """Its backward sends a gradient there and back, as that of experts does, and leaves two weight
    gradients.
    """

    def __init__(self, name, log):
        self.name = name
        self.log = log

    def backward(self, saved, grad, later):
        yield Travelling(f"{self.name} there", self.log)
        self.log.append(f"{self.name} experts")
        back = Travelling(f"{self.name} back", self.log)
        later(
            WeightGradients([TurnProduct(self.log, f"{self.name}1"), TurnProduct(self.log, f"{self.name}2")])
        )
        yield back


def test_weight_gradients_are_added_while_two_operations_travel():
    """The other walk starts its own before they are; alone, they cover what was started last."""
    log = []
    run(backward([TurnItem("b", log)], [None], None))
    assert log == [
        "start b there",
        "wait b there",
        "b experts",
        "start b back",
        "add b2",
        "add b1",
        "wait b back",
    ]
    log.clear()
    run_together([walk("f", log, "RaSb"), backward([TurnItem("b", log)], [None], None)])
    assert log == [
        "start fR", "start b there", "wait fR", "fa", "start fS", "wait b there", "b experts",
        "start b back", "wait fS", "fb", "add b2",
        "add b1", "wait b back",
    ]  # fmt: skip

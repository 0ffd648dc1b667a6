"""Put gradient reductions between the parts of backwards."""

from typing import NamedTuple

from mpitrain.schedules.actions import ADD_TO_GRADIENTS, PAIR, REDUCE, SENDS, Action


class Reduction(NamedTuple):
    """When the gradient buckets of one stage are complete.

    Its backward has `num_parts` parts, walked 0, 1, ...; bucket k is complete after part ready[k]
    of the last one.
    over, then: of each bucket the axes it is summed over before the data axis, and after it (see
    sums).
    """

    num_parts: int
    ready: tuple[int, ...]
    over: tuple[tuple[str, ...], ...] = ()
    then: tuple[tuple[str, ...], ...] = ()


def with_reductions(
    program: list[Action], stage: int, reduction: Reduction, *, tail: int = 1, each: bool = False
) -> list[Action]:
    """Walk a stage's last `tail` backwards in parts, in the last one's place, with its reductions.

    each: walk every backward in parts, in its own place, with its own reductions. What is summed
    over other axes first is reduced once all the same, with the last.
    A backward that is in parts already, in a pair, stays where it is; `tail` is then 1.
    """
    adding = _adding_to_gradients(program, stage)
    together = [[backward] for backward in adding] if each else [adding[-tail:]]
    groups = {group[-1]: group for group in together}
    walked = {backward for group in together for backward in group}
    result: list[Action] = []
    for position, action in enumerate(program):
        if action == PAIR and program[position + 2] in walked:
            continue  # a backward that is whole so far, and will be walked in parts, stands alone
        whole = _whole(action)
        if whole not in walked:
            result.append(action)
        elif whole in groups:
            for part in range(reduction.num_parts) if action == whole else [action.part]:
                walk = [member._replace(part=part) for member in groups[whole]]
                result += walk + _complete(walk[-1], reduction, each, last=whole == adding[-1])
    return _sends_first(result)


def _adding_to_gradients(program: list[Action], stage: int) -> list[Action]:
    """Return the backwards that add to a stage's weight gradients, whole, each once, in their order."""
    adding = (action for action in program if action.stage == stage and action.kind in ADD_TO_GRADIENTS)
    return list(dict.fromkeys(map(_whole, adding)))


def _complete(backward: Action, reduction: Reduction, each: bool, last: bool) -> list[Action]:
    """Return the reductions of the buckets that are complete after a part of a backward."""
    _, microbatch, stage, part = backward
    complete = []
    for bucket, ready in enumerate(reduction.ready):
        once = not each or bool(reduction.over and reduction.over[bucket])
        if ready == part and (last or not once):
            complete.append(REDUCE(bucket, stage, None if once else microbatch))
    return complete


def _whole(action: Action) -> Action:
    return action if action.part is None else action._replace(part=None)


def _sends_first(program: list[Action]) -> list[Action]:
    """Move each send in front of reductions: another rank waits for it, nobody yet for them."""
    result: list[Action] = []
    for action in program:
        at = len(result)
        while action.kind in SENDS and at and result[at - 1].kind == "REDUCE":
            at -= 1
        result.insert(at, action)
    return result

"""Put gradient reductions between the parts of backwards."""

from typing import NamedTuple

from mpitrain.schedules.actions import ADD_TO_GRADIENTS, PAIR, REDUCE, Action


class Reduction(NamedTuple):
    """When the gradient buckets of one stage are complete.

    The stage's backward has `num_parts` parts, walked 0, 1, ...; bucket k is complete after part ready[k] of the last backward.
    over, then: for each bucket the axes it is summed over before the data axis, and after it (see sums); absent, none.
    """

    num_parts: int
    ready: tuple[int, ...]
    over: tuple[tuple[str, ...], ...] = ()
    then: tuple[tuple[str, ...], ...] = ()


def with_reductions(program: list[Action], stage: int, reduction: Reduction, *, tail: int = 1, each: bool = False) -> list[Action]:
    """Walk the last `tail` backwards of a stage part by part, at the place of the last one, with the stage's reductions.

    each: walk every backward in parts, each at its own place and with its own reductions. What is summed over other axes first is
    reduced once all the same, with the last.
    """
    adding = [action for action in program if action.stage == stage and action.kind in ADD_TO_GRADIENTS]
    groups = [[action] for action in adding] if each else [adding[-tail:]]
    walks = {group[-1]: _part_by_part(group, reduction, each, last=group is groups[-1]) for group in groups}
    walked = {action for group in groups for action in group}
    result: list[Action] = []
    for position, action in enumerate(program):
        if action == PAIR and program[position + 2] in walked:
            continue  # a backward that is walked in parts stands alone
        if action in walked:
            result += walks.get(action, [])
        else:
            result.append(action)
    return _sends_first(result)


def _part_by_part(backwards: list[Action], reduction: Reduction, each: bool, last: bool) -> list[Action]:
    _, microbatch, stage, _ = backwards[-1]
    walk = []
    for part in range(reduction.num_parts):
        walk += [backward._replace(part=part) for backward in backwards]
        for bucket, ready in enumerate(reduction.ready):
            once = not each or bool(reduction.over and reduction.over[bucket])
            if ready == part and (last or not once):
                walk.append(REDUCE(bucket, stage, None if once else microbatch))
    return walk


def _sends_first(program: list[Action]) -> list[Action]:
    """Move each gradient's send in front of the reductions it stands behind: another rank waits for it, nobody yet for them."""
    result: list[Action] = []
    for action in program:
        at = len(result)
        while action.kind == "SEND_B" and at and result[at - 1].kind == "REDUCE":
            at -= 1
        result.insert(at, action)
    return result

"""Have only those parameters whole that are needed now or next (ZeRO-3), bucket by bucket.

Gathering is a prefetch, PyTorch's UNSHARD; releasing its RESHARD.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from mpitrain.schedules.actions import GATHER, RELEASE, SENDS, USE_PARAMETERS, Action
from mpitrain.schedules.pairs import grouped

Key = tuple[int, int]  # (stage, bucket)


class Residency(NamedTuple):
    """Which parameters each part of a stage needs, and how long they stay.

    uses: for each stage and each part of its backward, the buckets that it needs, shared or not;
    part i of the forward, or of R, has the blocks of part num_parts - 1 - i of the backward.
    ahead: how many parts before its use a bucket is gathered, to travel meanwhile; a pair's two are
    one.
    until: "use": released when it is not needed. "step": kept from its first use in the step to its
    last.
    """

    uses: tuple[tuple[tuple[int, ...], ...], ...]
    ahead: int = 1
    until: Literal["use", "step"] = "use"

    def num_parts(self, stage: int) -> int:
        return len(self.uses[stage])

    def needed(self, action: Action) -> list[Key]:
        """Return the buckets that a computation needs: none for W, and for what isn't one."""
        if action.kind not in USE_PARAMETERS:
            return []
        kind, _, stage, part = action
        parts: Sequence[tuple[int, ...]] = self.uses[stage]
        if part is not None:
            parts = [parts[len(parts) - 1 - part if kind in ("F", "R") else part]]
        return list(dict.fromkeys((stage, bucket) for part in parts for bucket in part))

    def needed_together(self, group: Iterable[Action]) -> list[Key]:
        """Return the buckets that a computation needs, or the two of a pair."""
        return _merged(map(self.needed, group))

    def windows(self, program: Iterable[Action]) -> list[list[Key]]:
        """Return the buckets of each part, or pair, that needs any: its own and the next `ahead`'s.

        With until="step" also those that were needed before and will be again.
        """
        needed = [keys for group in grouped(program) if (keys := self.needed_together(group))]
        if self.until == "use":
            return [_merged(needed[i : i + self.ahead + 1]) for i in range(len(needed))]
        first = {key: i for i, keys in reversed(list(enumerate(needed))) for key in keys}
        last = {key: i for i, keys in enumerate(needed) for key in keys}
        every = _merged(needed)
        return [
            [key for key in every if first[key] - self.ahead <= i <= last[key]] for i in range(len(needed))
        ]


def _merged(lists: Iterable[list[Key]]) -> list[Key]:
    return list(dict.fromkeys(key for keys in lists for key in keys))


def in_parts(program: Iterable[Action], residency: Residency) -> list[Action]:
    """Walk everything that needs parameters in parts, if it isn't yet."""
    walked: list[Action] = []
    for action in program:
        whole = action.kind in USE_PARAMETERS and action.part is None
        walked += (
            [action._replace(part=part) for part in range(residency.num_parts(action.stage))]
            if whole
            else [action]
        )
    return walked


def with_residency(program: list[Action], residency: Residency) -> list[Action]:
    """Put GATHER and RELEASE into one rank's program, whose parts stand where they shall be.

    What a part was the last to need is dropped right after it, unless it is gathered again at once.
    Then the sends leave, as other ranks wait for them, and then the next part's buckets are
    gathered: before a receive, a reduction or a W that may stand between, so that they travel
    meanwhile.
    """
    windows = iter([*residency.windows(program), []])
    held = next(windows)
    result = _gathers(held)
    due: list[Action] = []
    for group in grouped(program):
        if group[0].kind not in SENDS:
            result = result + due
            due = []
        result += group
        if residency.needed_together(group):
            before = held
            held = next(windows)
            result += [RELEASE(bucket, stage) for stage, bucket in before if (stage, bucket) not in held]
            due = _gathers(key for key in held if key not in before)
    return result + due


def _gathers(keys: Iterable[Key]) -> list[Action]:
    return [GATHER(bucket, stage) for stage, bucket in keys]

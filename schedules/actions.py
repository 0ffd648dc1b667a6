"""One instruction of a rank's program, and its text form.

    F3@1        forward of microbatch 3 on stage 1
    B3@1        its whole backward
    I3@1, W3@1  its backward for inputs, and for weights
    R3@1        its forward again, before B3@1 or I3@1: activation recomputation. F3@1 then keeps its
                input alone
    B7@1/0      part 0 of a backward that is walked in parts, from the last block to the first;
                I7@1/0 and W7@1/0 likewise
    F7@1/0      part 0 of a forward that is walked in parts, from the first block to the last: of n
                parts, F7@1/0 and B7@1/n-1 are the same blocks
    O3@1        before F3@1: what it keeps goes to host memory while it runs, and comes back while
                B3@1 or I3@1 runs: activation offloading
    SEND_F3@1   stage 1 sends its output to the next stage
    RECV_F3@1   stage 1 receives its input from the previous one
    SEND_B3@1   stage 1 sends the gradient of its input back
    RECV_B3@1   stage 1 receives the gradient of its output
    GATHER4@1   start fetching the parameters of bucket 4 of stage 1
    RELEASE4@1  drop them
    SUM2@1      start summing the gradients of bucket 2 of stage 1 over the axis its copies lie on;
                SUM2@1/0 and SUM2@1/1 of two axes
    REDUCE2@1   start the gradient reduction of bucket 2 of stage 1; REDUCE2@1/5 of what microbatch 5
                has added to it
    PAIR        run the next two together, a forward and a backward, or a part of each: what one
                waits for is hidden behind the other
    COPY        start sending what was copied of the state after the last step to a rank on another
                node
    NORM        global gradient norm; waits for all that was started
    UPDATE      optimiser on the owned shard
    SPREAD      send updated parameters back

B is the whole backward, as in PyTorch and DeepSeek-V3; the zero-bubble paper (arXiv:2401.10241)
writes B for our I. PyTorch's pipelining has UNSHARD, RESHARD and REDUCE_GRAD for a stage's GATHER,
RELEASE and REDUCE.
"""

import re
import textwrap
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from mpitrain.errors import ScheduleError

COMPUTE = ("F", "B", "I", "W", "R")
ADD_TO_GRADIENTS = ("B", "W")  # the kinds that add to weight gradients
USE_PARAMETERS = ("F", "B", "I", "R")  # W multiplies activations and gradients, and needs no parameters
SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")
REPEATED = ("GATHER", "RELEASE")  # as often as it takes; of the others each stands once
OF_GRADIENTS = ("SUM", "REDUCE")
OFFLOAD = "O"
INDEXED = (*COMPUTE, OFFLOAD, *SENDS, *RECEIVES, *REPEATED, *OF_GRADIENTS)
AT_END = ("NORM", "UPDATE", "SPREAD")  # once per step, for all stages of the rank
PLAIN = (*AT_END, "PAIR", "COPY")  # without index and stage


class Action(NamedTuple):
    """One instruction. index: counts microbatches; for GATHER, RELEASE, SUM and REDUCE buckets.

    part: of a computation; of a SUM its axis' number, if the bucket has two; of a REDUCE the
    microbatch.
    """

    kind: str
    # None for PLAIN kinds alone, whose index and stage nobody asks for. `index` hides tuples' method.
    index: int = None  # type: ignore[assignment]  # see above
    stage: int = None  # type: ignore[assignment]  # see above
    part: int | None = None

    def __str__(self) -> str:
        if self.index is None:
            return self.kind
        return f"{self.kind}{self.index}@{self.stage}" + ("" if self.part is None else f"/{self.part}")


# ---------------------------------------------------------------- short constructors


F, B, W = partial(Action, "F"), partial(Action, "B"), partial(Action, "W")
I = partial(Action, "I")
SEND_F, RECV_F = partial(Action, "SEND_F"), partial(Action, "RECV_F")
SEND_B, RECV_B = partial(Action, "SEND_B"), partial(Action, "RECV_B")
GATHER, RELEASE = partial(Action, "GATHER"), partial(Action, "RELEASE")
SUM, REDUCE = partial(Action, "SUM"), partial(Action, "REDUCE")
NORM, UPDATE, SPREAD, PAIR, COPY = map(Action, PLAIN)

# ---------------------------------------------------------------- text

# One spelling per action (no leading zeros), so that text -> action -> text is exact too.
_NUMBER = "(0|[1-9][0-9]{0,8})"
_TOKEN = re.compile(f"([A-Z_]+?)(?:{_NUMBER}@{_NUMBER}(?:/{_NUMBER})?)?")


def parse(text: str) -> Action:
    """Read one action, the inverse of `str(action)`. Raises ScheduleError naming the token."""
    match = _TOKEN.fullmatch(text)
    if match is None:
        raise ScheduleError(f"{text[:100]!r} is no instruction; write for example F3@1 or B3@1")
    kind, index, stage, part = match.groups()
    if index is None:
        action = Action(kind)
    else:
        action = Action(kind, int(index), int(stage), None if part is None else int(part))
    _refuse_misfit(action, text)
    return action


def _refuse_misfit(action: Action, text: str) -> None:
    kind, index, _, part = action
    text = text[:100]
    kind = kind[:100]
    if kind not in INDEXED + PLAIN:
        raise ScheduleError(f"{text!r}: unknown instruction {kind}; there are {' '.join(INDEXED + PLAIN)}")
    if (index is None) != (kind in PLAIN):
        raise ScheduleError(
            f"{text!r}: {kind} "
            f"{'has no index and no stage' if kind in PLAIN else f'needs both, as in {kind}3@1'}"
        )
    if part is not None and kind not in (*COMPUTE, *OF_GRADIENTS):
        raise ScheduleError(
            f"{text!r}: only {' '.join(COMPUTE)} have parts, SUM axes and REDUCE microbatches, {kind} has "
            "none of them"
        )


def parse_program(text: str) -> list[Action]:
    """Read whitespace-separated actions; `#` starts a comment. Raises ScheduleError naming line and token."""
    actions = []
    for number, line in enumerate(text.splitlines(), start=1):
        for token in line.partition("#")[0].split():
            try:
                actions.append(parse(token))
            except ScheduleError as error:
                raise ScheduleError(f"line {number}: {error.args[0]}") from None
    return actions


def format_program(actions: Iterable[Action], width: int = 100, first: str = "") -> str:
    """Write actions as text of at most `width` columns a line; `parse_program` reads it back exactly.

    first: what the text begins with, as a line of a table does; later lines are indented then.
    """
    words = " ".join(map(str, actions))
    return textwrap.fill(
        words,
        width,
        break_long_words=False,
        break_on_hyphens=False,
        initial_indent=first,
        subsequent_indent="  " * bool(first),
    )

"""What can be chosen of a schedule besides its size."""

from typing import NamedTuple

from mpitrain.schedules.search_progress import Notify


class Times(NamedTuple):
    """Times of one rank's whole share of layers for one microbatch; a chunk has its part of it."""

    forward: float = 1
    input: float = 1  # backward for inputs
    weight: float = 1  # backward for weights
    message: float = 0  # from a stage to the next


UNIT_TIMES = Times()
# of a stash, the input of a stage of one block: a block keeps some twenty times its input
INPUT_SHARE = 0.05


class StageTimes(NamedTuple):
    """Times of one stage for one microbatch: with an embedding, a head or more blocks it has its own."""

    forward: float
    input: float
    weight: float


class Options(NamedTuple):
    """None: the schedule's own choice."""

    chunks: int | None = None  # stages per rank
    # microbatches that go through a chunk before the next chunk's turn (interleaved)
    group: int | None = None
    segments: int | None = None  # of a microbatch's sequence (seq1f1b)
    times: Times | None = None  # measured, for the automatic schedulers
    # measured, of each stage of one copy, instead of equal shares of `times`
    stage_times: tuple[StageTimes, ...] | None = None
    # stashes of a whole rank's share of layers, for the automatic schedulers
    memory_limit: float | None = None
    # share of a stash that is still held between I and W, if memory_limit counts bytes
    weight_memory: float | None = None
    # automatic schedulers may recompute, and keep this share of a stash then: the input of the stage
    recompute: float | None = None
    # automatic schedulers may offload; the time to copy a rank's whole stash, one way
    offload: float | None = None
    notify: Notify | None = None  # hears how far a search is; changes nothing

    def given(self) -> list[str]:
        """Return the names of the options that are set."""
        return [name for name, value in zip(self._fields, self) if value is not None and name != "notify"]

    def only(self, takes: tuple[str, ...]) -> "Options":
        """Return the options that a schedule takes; the others are left to its own choice."""
        return self._replace(**dict.fromkeys((name for name in self.given() if name not in takes), None))

    def strict(self) -> "Options":
        """Count whole stashes against a user's limit, unless weight_memory is given."""
        return (
            self
            if self.memory_limit is None or self.weight_memory is not None
            else self._replace(weight_memory=1)
        )


DEFAULTS = Options()

"""Which steps and ranks torch's profiler records: run.profile, such as "steps=20-22, ranks=0,5"."""

import re
from typing import NamedTuple

from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import shown

FORM = re.compile(r"steps\s*=\s*([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?(?:\s*,\s*ranks\s*=\s*([0-9,\s]+))?")
MOST_DIGITS = 9  # of a rank


class ProfileRequest(NamedTuple):
    """The steps that are profiled, one after the other, and the ranks, in ascending order."""

    steps: range
    ranks: tuple[int, ...]

    @staticmethod
    def read(text: str) -> "ProfileRequest | None":
        """Read run.profile; "" asks for nothing. Raises ConfigError."""
        if not text.strip():
            return None
        match = FORM.fullmatch(text.strip())
        ranks = [rank.strip() for rank in (match[3] or "0").split(",")] if match else []
        if match is None or not all(rank.isdigit() and len(rank) <= MOST_DIGITS for rank in ranks):
            raise ConfigError(
                f'run.profile = "{shown(text)}": needed steps, and ranks if it isn\'t rank 0 alone, such as '
                'run.profile = "steps=20-22, ranks=0,5"'
            )
        first = int(match[1])
        last = int(match[2] or first)
        if not 1 <= first <= last:
            raise ConfigError(
                f'run.profile = "{shown(text)}": found steps {first} to {last}; needed steps from 1 on, the '
                "first before the last"
            )
        return ProfileRequest(range(first, last + 1), tuple(sorted(set(map(int, ranks)))))

    def require(self, num_ranks: int, num_steps: int) -> None:
        """Raise ConfigError if there is no such rank or step."""
        if self.ranks[-1] >= num_ranks:
            raise ConfigError(
                f"run.profile: found rank {self.ranks[-1]} of {counted(num_ranks, 'ranks')}, the "
                f"last is {num_ranks - 1}; name ranks up to that"
            )
        if self.steps[-1] > num_steps:
            raise ConfigError(
                f"run.profile: found step {self.steps[-1]}, but run.steps = {num_steps}; name "
                "steps up to that, or raise run.steps"
            )

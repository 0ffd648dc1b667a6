"""How long a rank may stay where it is: as long as comm.timeout_s says, else as its own steps show.

until two steps are measured  FIRST_S: files are read, memory is made, nothing is typical
then                          TIMES the longest step so far, the first one not counted; between
                              LEAST_S and FIRST_S
"""

FIRST_S = 600.0
LEAST_S = 60.0
TIMES = 10.0


class Limit:
    """The limit of one rank. given: by the user, in seconds; None: it is measured."""

    def __init__(self, given: float | None):
        self._given = given
        self._longest_s = 0.0
        self._num_steps = 0

    def took(self, step_s: float) -> None:
        """Take note of how long a step took."""
        self._num_steps += 1
        if self._num_steps > 1:
            self._longest_s = max(self._longest_s, step_s)

    @property
    def seconds(self) -> float:
        """The limit now."""
        if self._given is not None:
            return self._given
        return FIRST_S if self._num_steps < 2 else min(FIRST_S, max(LEAST_S, TIMES * self._longest_s))

"""pytest that leaves the cores to others that want them.

python low_priority.py -q tests/unit
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest


def lower_priority() -> None:
    """Leave the cores to others that want them, all but a few hundredths.

    Who gets nothing at all for a minute runs into its limits.
    """
    os.nice(15)
    with suppress(OSError):  # where Linux divides time between sessions first
        Path("/proc/self/autogroup").write_text("15", encoding="ascii")


if __name__ == "__main__":
    lower_priority()
    sys.exit(pytest.main(sys.argv[1:]))

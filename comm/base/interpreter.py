"""The command of a Python child: the one place that makes it.

For `-c` and `-m` Python puts the current folder first on its path. That folder may be a stranger's run
directory, whose `json.py` would be run. -P leaves it out.
"""

import sys


def python(*arguments: str) -> list[str]:
    """Return the words that start this interpreter; it imports nothing of the current folder."""
    return [sys.executable, "-P", *arguments]

"""Commands one after the other, as several.py runs them; then how much memory they took.

USAGE in the environment is the file for two numbers: the most bytes of this process, and of a child.
"""

import json
import os
import resource
import sys
from pathlib import Path

import command_sequence

if __name__ == "__main__":
    command_sequence.main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    most = [
        1024 * resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    Path(os.environ["USAGE"]).write_text(json.dumps(most), encoding="ascii")

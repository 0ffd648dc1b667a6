"""`python -m mpitrain` is `mpitrain`, where its script isn't on the path.

`python -m mpi4py -m mpitrain` works, too. As by the script, nothing of the current folder is imported:
`-m` puts that folder first on the path, and here it is taken off. By then Python has looked for
`mpitrain` itself there, which only `python -P -m mpitrain` prevents.
"""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]
    from mpitrain.cli import main

    main()

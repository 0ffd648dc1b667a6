"""`python -m mpitrain` is `mpitrain`, where its script isn't on the path.

`python -m mpi4py -m mpitrain` works, too.
"""

from mpitrain.cli import main

if __name__ == "__main__":
    main()

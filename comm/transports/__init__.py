"""How bytes travel over an axis: messages, MPI's collectives, shared memory, two levels."""

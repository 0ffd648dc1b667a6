"""One rank's part in a step, recorded and computed again alone, without MPI: `run --record`, `replay`."""

"""`mpitrain job`: a batch script for Slurm, PBS, LSF, Flux or Kubernetes; and whether a job starts again."""

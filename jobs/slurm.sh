#!/bin/bash
# sbatch jobs/slurm.sh CONFIG.toml      one rank per task; leaves with a checkpoint before the time is up and queues itself again
#SBATCH --job-name=mpitrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun mpitrain run "$@"
code=$?
[ $code -eq 75 ] && scontrol requeue "$SLURM_JOB_ID" # 75: stopped early with a checkpoint
exit $code

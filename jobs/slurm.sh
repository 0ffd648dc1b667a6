#!/bin/bash
# @written@
# Submit it with: sbatch @script@
# ---------------------------------------------------------------- the site: see sbatch(1)
#SBATCH --job-name=@name@
#SBATCH --nodes=@all_nodes@
#SBATCH --ntasks-per-node=@ranks_per_node@
#SBATCH --cpus-per-task=@cores@
#SBATCH --time=@time@
#SBATCH --output=@name@-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
@directives@
LAUNCH=(@launch@) # starts the ranks
ARGUMENTS=(@arguments@)
export SRUN_CPUS_PER_TASK=@cores@ # since 22.05 srun doesn't take it from the job
export SLURM_KILL_BAD_EXIT=1     # a rank that dies before it reaches the others would keep them waiting
@setup@

if [ "${LAUNCH[0]}" = srun ]; then
    # Under --mpi=pmi2 MPICH names its shared memory after job and step, and what a killed step has left keeps the next one of
    # that name from starting. A requeued job counts its steps from 0: continue the count.
    for _ in $(seq "${SLURM_RESTART_COUNT:-0}"); do
        srun --mpi=none --nodes=1 --ntasks=1 true
    done
fi
@body@
state() { squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T; } # of this job, which may have been cancelled
if again && [ ! "$cancelled" ] && [ "$(state)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"

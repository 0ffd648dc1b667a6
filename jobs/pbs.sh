#!/bin/bash
# @written@
# Submit it with: qsub @script@
# ---------------------------------------------------------------- the site: see qsub(1B)
#PBS -N @name@
#PBS -l select=@nodes@:ncpus=@cores_per_node@:mpiprocs=@ranks_per_node@@gpus@
#PBS -l place=scatter
#PBS -l walltime=@time@
#PBS -j oe
#PBS -r y
@directives@
MPITRAIN_JOB_END=$(($(date +%s) + @seconds@)) # when this job has to be gone
export MPITRAIN_JOB_END
LAUNCH=(@launch@) # starts the ranks
ARGUMENTS=(@arguments@)
@setup@

@body@
if again && [ ! "$cancelled" ]; then
    qsub @script@ # a job of its own: qrerun is for operators
fi
exit "$code"

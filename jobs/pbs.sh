#!/bin/bash
# qsub -v CONFIG=my.toml jobs/pbs.sh
#PBS -N mpitrain
#PBS -l select=2:ncpus=32:mpiprocs=4
#PBS -l walltime=04:00:00

: "${CONFIG:?give the configuration: qsub -v CONFIG=my.toml jobs/pbs.sh}"
cd "$PBS_O_WORKDIR" || exit 1
export OMP_NUM_THREADS=8
mpirun mpitrain run "$CONFIG"

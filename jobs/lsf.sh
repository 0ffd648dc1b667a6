#!/bin/bash
# @written@
# Submit it with: bsub < @script@
# ---------------------------------------------------------------- the site: see bsub(1)
#BSUB -J @name@
#BSUB -n @ranks@
#BSUB -R "span[ptile=@ranks_per_node@] affinity[core(@cores@)]"
#BSUB -W @minutes@
#BSUB -o @name@-%J.out
#BSUB -Q "75"
#BSUB -r
@directives@
# A slot is a rank with its cores. Where LSF has no affinity scheduling and a slot is a core, ask for
# -n @all_cores@ and ptile=@cores_per_node@, and let LAUNCH place @ranks_per_node@ ranks on each node (-ppn, or --map-by ppr).
MPITRAIN_JOB_END=$(($(date +%s) + @seconds@)) # when this job has to be gone
export MPITRAIN_JOB_END
LAUNCH=(@launch@) # starts the ranks
ARGUMENTS=(@arguments@)
@setup@

@body@
if again && [ ! "$cancelled" ]; then
    exit 75 # -Q: LSF starts a job again that ends with this
fi
[ "$code" -ne 75 ] && exit "$code"
exit 1

#!/bin/bash
# @written@
# Submit it with: flux batch @script@
# ---------------------------------------------------------------- the site: see flux-batch(1)
#flux: --job-name=@name@
#flux: --nodes=@nodes@
#flux: --exclusive
#flux: --time-limit=@seconds@s
#flux: --output=@name@-{{id}}.out
@directives@
LAUNCH=(@launch@) # starts the ranks
ARGUMENTS=(@arguments@)
@setup@

@body@
if again && [ ! "$cancelled" ]; then
    flux --parent batch @script@ # a job of its own, beside this one
fi
exit "$code"

"""One rank at work: it walks the program of its pipeline schedule over its stages.

actor                      builds all of it, and walks: each instruction is carried out by
stage_compute              F, B, I, W, PAIR, GATHER and RELEASE
pipeline_messages          SEND and RECV
update                     NORM, UPDATE and SPREAD
step_work                  what is under way in a step
communicators, contexts    the communicators of this rank; what its blocks are given of a microbatch
stage, stage_state         a pipeline stage: activations in flight; weights and gradients in buckets
partner_copies             COPY: copies of the state on their way to another node
reductions                 SUM and REDUCE, gradients of data parallelism: all-reduce, reduce-scatter
step_totals                loss, gradient norm and flags, in two small exchanges
memory, memory_meter       what this rank holds
trace                      the measured timeline
rehearsal                  what a rank would start in a step, on axes that send nothing
uncomputed                 its tensors, which have no memory: shapes only
profiler, profile_events   torch's profiler, whose operators and kernels stand under instructions
"""

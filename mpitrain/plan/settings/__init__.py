"""Fill in what a configuration left open, and refuse what doesn't fit together.

resolve                        the whole configuration: degrees, batch, vocabulary
job_ranks                      the ranks of a job, and the nodes that they are on
attention, experts, dispatch   what a family left open; how rows travel to experts
fp8_sizes                      the sides of matrices that are multiplied in fp8
pipeline_table                 the table of the configured schedule, or the user's own
partner                        which rank keeps copies of another one's state
schedule_choice                pipeline.schedule = "auto", and the times of pipeline.trace
recompute                      activation recomputation: how many blocks are recomputed together
rule_table                     which combinations are refused, because of what, and what to take instead
log_pace                       how often a step is printed
profile_request                which steps and ranks are profiled
key_origins                    where the keys that were filled in come from
identity                       which keys make two runs the same computation
"""

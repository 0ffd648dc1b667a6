"""A run, from its configuration to its last line.

agreement, prepare      one configuration on all ranks, checked, with its plan
run_opening, same_past  run directory, newest checkpoint, tokens; what may not change in a resumed run
run_plan                the plan of a run, its layout where that is open, and what is to be said of it
corpora                 the prepared tokens as steps read them: split, mixed, in their order
token_preparation       tokens alone, without a run: mpitrain data prepare
step_documents          which documents a step has read, from the run directory alone
repairs                 a run on all ranks it was started with; spares take the places of those that die
trainers                builds everything; once more where batches or rows grow
trainer                 loops over steps: train, validate, log, save
validation              the loss of held-out sequences
metrics_line            what metrics.jsonl has of a step, load balancing of experts
recovery                what a run resumes from, and goes back to after a spike
compile_warmup          compiles before the first step
announcements           what a run says before its first step
step_rows               the tokens of this rank's gradient accumulation
side_files              trace.json and routing.npz of some steps
profiling               torch's profiler on some steps and ranks: a table and profile.json
tokenizing              a corpus is tokenized on all ranks
run_report              what a run prints
run_end, next_commands  what it prints and keeps at its end (summary.json), and what it advises
task_scores             tasks that are scored at each validation
early_exit              an early exit with a checkpoint: signals, time limits
saving/                 checks/  replay/  machine/
"""

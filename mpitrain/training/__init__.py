"""A run, from its configuration to its last line.

agreement, opening     one configuration on all ranks; run directory, newest checkpoint, tokens
trainer                builds everything, then loops over steps: train, validate, log, save
practice               compiles before the first step
microbatches           the tokens of this rank's gradient accumulation
tokenizing             a corpus is tokenized on all ranks
console, expert_loads, going_on    what a run prints, draws and advises
leaving                an early exit with a checkpoint: signals, time limits
dry_run                `mpitrain run --dry-run`
saving/  checks/  replay/  machine/
"""

"""What each command does, but for `run`.

requests             what each command can be asked: options, their words, types and defaults
declared_options     click's options, made of a request's fields
inspect              program, check, memory
schedule/            a pipeline schedule, played and drawn
plan/                plan, sweep, published layouts
verify, doctor       whether a layout is right; whether an environment is
evaluation           texts and tasks, scored
generate             prompts, and text from a checkpoint
ckpt/, weights       checkpoints; import and export
data/                training data: what a step has read
job/                 a batch script
bench                a machine, measured
report_page, watch   a page or a picture of runs, and runs under way
reference/           pages made from the source
output_file          a file that --out or --svg names: checked before any work, and written at once
"""

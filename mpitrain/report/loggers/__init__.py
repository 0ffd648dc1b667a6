"""Loggers of a run: programs that show its curves, beside metrics.jsonl.

Each is a process of its own, which follows metrics.jsonl: the run never waits for it, imports
nothing of it and survives it. The whole of metrics.jsonl is logged again at each start, so that
what restarts and rollbacks repeat stands once; one that resumes gets the new lines alone, where no
step is repeated.

logger_children      rank 0's side: starts them, reports one that fails, ends them
logger_process       the child: follows metrics.jsonl and gives its lines to a logger
catalog              which loggers there are, and what a logger of the user's own needs
value_names          what the numbers are called: train/loss, perf/mfu, eval/loss
tensorboard_events   TensorBoard's event files
csv_files            tables of comma-separated values
wandb_run            Weights & Biases
mlflow_run           MLflow, in a SQLite file
"""

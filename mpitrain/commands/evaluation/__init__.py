"""`mpitrain eval`.

printed            parse and print
evaluated_config   the run's model in the layout of this job, for sequences of a length
evaluated_run      files and tasks, one after the other; the result
"""

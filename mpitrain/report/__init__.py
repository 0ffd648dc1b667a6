"""Pages of runs: what a run directory holds, read with limits, and shown. Nothing here trains.

recorded_run   a run directory's steps, ends, evaluations, configuration, traced step
series         a run's steps as columns, read as they come, thinned so that spikes stay
curves         what is drawn of them, in which colours
figures        curves and a step's timeline on a page (bokeh)
page, tables   one HTML file that needs no network
run_ends       how reliable a run was
paper_picture  curves for a paper (matplotlib)
live           a page of runs under way, served on this host
terminal       runs in a terminal
run_picture    run.svg and loads.svg, which a run leaves (no library)
loggers/       TensorBoard, CSV, W&B, MLflow and others, each in a process of its own
"""

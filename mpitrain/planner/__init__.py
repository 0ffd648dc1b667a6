"""The planner: choose a layout by predicted time and memory, and compare predictions with steps.

choice                  the layouts that fit a number of ranks and a machine, best first
search, candidates      which layouts are looked at, and how they are ranked
explained               why: what the runner-up lost, what binds
of_config               the model of a configuration, before it has a layout
what_if                 a machine with other figures
goodput                 how long a training takes with failures and saves
layout_request, run_layout     a run's layout where its configuration leaves it open
measured_run, after_run        what a run has measured, beside what was predicted
calibrate, calibration_file    a machine's file changes by what a run has measured
backtest_errors, published_rows, row_layout, assumed    predictions beside published steps
fitted                         constants of a machine, fitted to steps
"""

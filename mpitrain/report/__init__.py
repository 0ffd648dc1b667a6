"""Pages of runs: what a run directory holds, read with limits, and shown. Nothing here trains.

recorded_run   a run directory's steps, ends, evaluations, configuration, traced step
series         a run's steps as columns, thinned so that spikes stay
figures        curves over steps, communication, a step's timeline (bokeh)
page           one HTML file that needs no network
"""

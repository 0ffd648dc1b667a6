"""`mpitrain schedule`: a pipeline schedule played, printed, drawn, compared with others and a trace."""

"""`mpitrain plan`: choose a configuration; hold predictions against published steps, and runs."""

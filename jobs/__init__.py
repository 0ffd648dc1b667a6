"""Templates of jobs (`mpitrain job` fills in what is between @) and configurations to begin with. No code."""

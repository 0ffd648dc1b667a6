"""`mpitrain ckpt`: inspect, verify, diff, reshard (other files, the same arrays), prune, repair."""

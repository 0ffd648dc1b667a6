"""Lower a table to every rank's program: messages, reductions, prefetch, dependencies."""

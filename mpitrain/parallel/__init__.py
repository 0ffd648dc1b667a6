"""Layers that are spread over an axis. Each takes its axis; none looks one up."""
